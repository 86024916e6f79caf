"""A model that is trained on pictures has seen them: other samples' pictures cost it loss on the fact words."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

torch = pytest.importorskip("torch")

from trainer.comm import single_process  # noqa: E402
from trainer.config import FitConfig  # noqa: E402
from trainer.data import prepare, split  # noqa: E402
from trainer.loop import Trainer  # noqa: E402
from trainer.model_source import load_model_source  # noqa: E402
from trainer.seen import measure_seen  # noqa: E402

pytestmark = pytest.mark.torch

COLOURS = {"red": (200, 40, 40), "green": (40, 180, 60), "blue": (40, 60, 200), "yellow": (210, 200, 50)}
NUM_SAMPLES = 64


def picture(colour: tuple[int, int, int], seed: int) -> bytes:
    rng = np.random.Generator(np.random.Philox(seed))
    noise = rng.integers(-30, 31, size=(56, 56, 3))
    buffer = io.BytesIO()
    Image.fromarray(np.clip(noise + np.array(colour), 0, 255).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def make_trainer(
    write_shard: Callable[..., Path], chat_json: Callable[..., bytes], tmp_path: Path
) -> Callable[..., tuple[Trainer, object, np.ndarray]]:
    """A trainer on pictures of one colour each, with its data and its held-out ids."""

    def make(*, facts: bool = True, max_steps: int = 1) -> tuple[Trainer, object, np.ndarray]:
        members = []
        for i in range(NUM_SAMPLES):
            name = list(COLOURS)[i % len(COLOURS)]
            extra = {"facts": [name]} if facts else {}
            members += [
                (f"{i:03}.json", chat_json("<image>Colour?", f"It is {name}.", **extra)),
                (f"{i:03}.png", picture(COLOURS[name], i)),
            ]
        shard = write_shard(tmp_path / "colours.tar", members)
        config = FitConfig(
            data=str(shard),
            model="check",
            cache_dir=tmp_path / "cache",
            max_steps=max_steps,
            eval_share=0.25,
            lr=2e-2,
            num_workers=0,
            compare_steps=0,
        )
        model = load_model_source(config.model)
        side = prepare(config, config.data, model.processor)
        train_ids, held_out = split(side, share=config.eval_share, seed=config.seed)
        trainer = Trainer(
            config,
            model=model,
            side=side,
            train_ids=train_ids,
            eval_side=side,
            held_out_ids=held_out,
            comm=single_process(torch.device("cpu")),
            checkpoints=tmp_path / "checkpoints",
            report=lambda line: None,
        )
        return trainer, side, held_out

    return make


def test_training_makes_the_right_pictures_better_than_those_of_other_samples(
    make_trainer: Callable[..., tuple],
) -> None:
    trainer, side, held_out = make_trainer(max_steps=100)
    before = measure_seen(trainer, side, held_out)
    trainer.fit()
    after = measure_seen(trainer, side, held_out)
    assert before is not None
    assert after is not None
    assert (after.fact_tokens, after.num_samples) == (before.fact_tokens, len(held_out))
    # The untrained model knows nothing of either; the trained one loses by every picture that is not its own.
    assert abs(before.gain) < 0.02
    assert after.right < before.right
    assert after.gain > 0.1


def test_without_fact_words_there_is_nothing_to_measure(make_trainer: Callable[..., tuple]) -> None:
    trainer, side, held_out = make_trainer(facts=False)
    assert measure_seen(trainer, side, held_out) is None
