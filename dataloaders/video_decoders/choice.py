"""Which decoder is used in this process: the one that was named, or the first healthy one.

    choose("auto") -> AUTO_ORDER, the first whose self-test on a built-in clip passes    (once per process)
    take_frames(clip, wanted, keep, decoder=...) -> Taken; PyAV takes over what another decoder cannot, and says so

The self-test decodes two clips of known content, one of them turned: every frame that comes out must be the one that
was asked for, the right way up. It takes some 10 ms. `AUTO_ORDER` is what the table in docs/decoding.md measured.

Whatever decoder a rank ends up with, shapes and token counts are the plan's, so ranks stay in step; on files within the
lists of `vetting` the pixels are equal as well. torchcodec takes part in `auto` only where torch is loaded already: it
would cost seconds and hundreds of megabytes in a worker that has no other use for it.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Final

from dataloaders.errors import DataError, MediaError
from dataloaders.video_decoders.base import BackendFailed, Clip, Kept, Picture, Taken, VideoDecoder
from dataloaders.video_decoders.builtin_clip import NUM_FRAMES, builtin_clip, number_shown
from dataloaders.video_decoders.with_decord import DecordDecoder
from dataloaders.video_decoders.with_pyav import PyavDecoder
from dataloaders.video_decoders.with_torchcodec import TorchcodecDecoder

DECODERS: Final[Mapping[str, VideoDecoder]] = {
    decoder.name: decoder for decoder in (PyavDecoder(), DecordDecoder(), TorchcodecDecoder())
}
AUTO: Final = "auto"
AUTO_ORDER: Final = ("pyav", "torchcodec", "decord")
_LAST: Final = "pyav"  # what decodes when another decoder cannot
_SELF_TEST: Final = (0, 1, 4, 5, 9, 11)


@lru_cache(maxsize=16)
def choose(name: str = AUTO) -> VideoDecoder:
    """The decoder of a name, after its self-test.

    Raises:
        DataError: no such decoder, it cannot be used here, or it fails its self-test.
    """
    if name != AUTO:
        if name not in DECODERS:
            raise DataError(
                f"decoder={name!r} is none of {', '.join((AUTO, *DECODERS))}", remedy="Choose one of these."
            )
        fault = self_test(DECODERS[name])
        if fault:
            raise DataError(
                f"decoder {name} cannot be used here: {fault}", remedy="Install what it needs, or choose another."
            )
        return DECODERS[name]
    faults = []
    for each in AUTO_ORDER:
        if each == "torchcodec" and "torch" not in sys.modules:
            continue
        fault = self_test(DECODERS[each])
        if not fault:
            return DECODERS[each]
        faults.append(f"{each}: {fault}")
    raise DataError(f"no video decoder works ({'; '.join(faults)})", remedy="Reinstall PyAV.")


def self_test(decoder: VideoDecoder) -> str:
    """What is wrong with a decoder in this process; "" when it gives the right frames of the built-in clips."""
    problem = decoder.problem()
    if problem:
        return problem
    for turned in (False, True):
        clip = Clip(data=builtin_clip(turned=turned), place="self-test")
        try:
            taken = decoder.take(clip, _SELF_TEST, partial(number_shown, turned=turned))
        except (BackendFailed, MediaError) as error:
            return f"self-test: {error}"
        if tuple(taken.frames) != _SELF_TEST:
            how = "turned clip" if turned else "plain clip"
            return f"self-test on the {how}: frames {taken.frames} where {list(_SELF_TEST)} of {NUM_FRAMES} are right"
    return ""


def take_frames(
    clip: Clip, wanted: Sequence[int], keep: Callable[[Picture], Kept], *, decoder: str = AUTO
) -> Taken[Kept]:
    """What `keep` makes of the wanted frames (ascending numbers, repeats allowed) of a clip.

    Raises:
        DataError: as `choose`.
        MediaError: not one frame decodes, the file is refused, or more of it is damaged than
            `ProbeLimits.max_bad_frames` allows.
    """
    chosen = choose(decoder)
    try:
        taken = chosen.take(clip, wanted, keep)
    except BackendFailed as error:
        taken = replace(DECODERS[_LAST].take(clip, wanted, keep), fallback=f"{chosen.name}: {error}")
    clip.limits.check_bad_frames(
        bad=taken.bad_packets, read=taken.num_packets, repeated=taken.repeated, wanted=len(wanted), place=clip.place
    )
    return taken
