"""Drawing of one whole sample: its media, the dialogue about them, and the names they get in the tar.

Members follow the WebDataset convention: `000017.json` with `000017.jpg`, or with `000017.0.jpg`, `000017.1.png`.
"""

from collections.abc import Sequence

from dataloaders.demo import texts
from dataloaders.demo.clips import render_clip
from dataloaders.demo.facts import Measure
from dataloaders.demo.recipe import SampleSpec, rng_for
from dataloaders.demo.render import render_picture


def draw_sample(spec: SampleSpec, seed: int) -> list[tuple[str, bytes]]:
    """(member name, bytes) of one sample, the JSON first: a pure function of its arguments and the encoders."""
    key = f"{spec.sample_id:06d}"
    rng = rng_for(seed, 1 + spec.sample_id)
    if spec.clip is not None:
        data, facts = render_clip(spec.clip, rng)
        dialogue = texts.ask_clip(spec.question, facts, spec.clip.motion)
        return [(f"{key}.json", _json(spec, key, dialogue, [facts])), (f"{key}.mp4", data)]
    drawn = [render_picture(picture, rng) for picture in spec.pictures]
    measured = [facts for _, facts in drawn]
    if not drawn:
        dialogue = texts.text_only(spec.question, spec.length, rng)
    elif len(drawn) == 1:
        dialogue = texts.ask_picture(spec.question, measured[0])
    else:
        dialogue = texts.ask_pictures(spec.question, measured)
    members = [(f"{key}.json", _json(spec, key, dialogue, measured))]
    for index, (picture, (data, _)) in enumerate(zip(spec.pictures, drawn, strict=True)):
        field = f"{index}." if len(drawn) > 1 else ""
        members.append((f"{key}.{field}{picture.format}", data))
    return members


def _json(spec: SampleSpec, key: str, dialogue: texts.Dialogue, measured: Sequence[Measure]) -> bytes:
    truth: dict[str, object] = {
        "kind": spec.kind,
        "colour": [facts.colour for facts in measured],
        "brightness": [facts.brightness for facts in measured],
    }
    media = ["image"] * len(spec.pictures)
    if spec.clip is not None:
        media, truth["motion"] = ["video"], spec.clip.motion
    return texts.record_json(key, dialogue, media, parts_style=spec.parts_style, truth=truth)
