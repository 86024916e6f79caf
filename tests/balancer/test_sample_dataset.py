"""`SampleDataset`: samples in their planned shape by index, under pickling, several processes, and damaged data."""

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from balancer.loader_costs import PER_TOKEN, loader_costs
from balancer.sample_dataset import SampleDataset
from balancer.sample_reader import SampleReader
from dataloaders.demo import DEMO_PROCESSOR
from dataloaders.encoder import ByteEncoder
from dataloaders.errors import DataError, IndexFormatError, SourceError
from dataloaders.estimators import estimator_from_config
from dataloaders.index import CostIndex
from dataloaders.sample import LoadedSample
from dataloaders.scan import scan_source
from dataloaders.tar_source import TarSource
from dataloaders.template_encoder import TemplateEncoder
from dataloaders.tokenizer import Special

SPECIALS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif p.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in p %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)


@pytest.fixture(scope="module")
def dataset(small_shard: Path) -> SampleDataset:
    return SampleDataset.open(small_shard, DEMO_PROCESSOR)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in DEMO_PROCESSOR.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def add_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["What? A red one."], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def assert_equal(one: LoadedSample, other: LoadedSample) -> None:
    for name in ("tokens", "labels", "position_ids", "visual_index", "patches", "grids"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert (one.sample_id, one.place, one.replaced) == (other.sample_id, other.place, other.replaced)


def test_samples_have_the_shape_that_their_index_planned(dataset: SampleDataset) -> None:
    assert len(dataset) == 6
    for i in range(6):
        sample, index = dataset[i], dataset.cost_index
        assert isinstance(sample, LoadedSample)
        assert sample.sample_id == i
        assert sample.replaced is None
        assert len(sample.tokens) == index.samples["llm_tokens"][i]
        assert sample.patches.shape == (index.samples["patches"][i], dataset.patch_dim)
        assert len(sample.visual_index) == index.samples["visual_tokens"][i]
        assert int((sample.labels != -100).sum()) == index.samples["label_tokens"][i]
        assert sample.place == dataset.place(i)
    assert "key 003" in dataset.place(3)
    assert (dataset.merge, dataset.patch_dim) == (2, 1176)
    assert repr(dataset) == "SampleDataset(6 samples, 0 of them unusable)"


def test_indexing_is_that_of_a_sequence(dataset: SampleDataset) -> None:
    assert_equal(dataset[-1], dataset[5])
    assert_equal(dataset[np.int64(2)], dataset[2])
    for sample, i in zip(dataset.__getitems__([4, np.int64(0), -2]), (4, 0, 4), strict=True):
        assert_equal(sample, dataset[i])
    for i in (6, -7):
        with pytest.raises(IndexError, match=f"sample {i} is not one of the 6 samples of this dataset"):
            dataset[i]
    with pytest.raises(IndexError):
        dataset.place(6)
    assert [sample.sample_id for sample in dataset] == list(range(6)), "iteration ends"  # type: ignore[attr-defined]


def test_the_loader_finds_its_costs(dataset: SampleDataset) -> None:
    costs = loader_costs(dataset, cost=None, cost_index=None)
    assert costs.index is dataset.cost_index
    assert costs.labels_known
    assert costs.cost_model is PER_TOKEN


def test_it_is_the_same_in_another_process(dataset: SampleDataset) -> None:
    again = pickle.loads(pickle.dumps(dataset))
    for i in (0, 5):
        assert_equal(again[i], dataset[i])
    assert again.cost_index.fingerprint == dataset.cost_index.fingerprint


@pytest.mark.torch
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_torchs_loader_takes_it_with_workers(dataset: SampleDataset, context: str) -> None:
    data = pytest.importorskip("torch.utils.data")
    loader = data.DataLoader(dataset, batch_size=3, num_workers=1, collate_fn=list, multiprocessing_context=context)
    samples = [sample for batch in loader for sample in batch]
    for i, sample in enumerate(samples):
        assert_equal(sample, dataset[i])


def test_torch_is_not_needed(small_shard: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from balancer.sample_dataset import SampleDataset\nfrom balancer.loader_costs import loader_costs\n"
        "from dataloaders.demo import DEMO_PROCESSOR\n"
        f"dataset = SampleDataset.open({str(small_shard)!r}, DEMO_PROCESSOR)\n"
        "print(len(dataset[1].tokens), len(loader_costs(dataset).index))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split()[1] == "6"


def test_a_kept_index_is_built_once_and_mapped_by_all_who_start_together(small_shard: Path, tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "index"
    code = (
        "import sys, logging\n"
        "from balancer.sample_dataset import SampleDataset\nfrom dataloaders.demo import DEMO_PROCESSOR\n"
        "said = []\n"
        f"dataset = SampleDataset.open({str(small_shard)!r}, DEMO_PROCESSOR, index={str(kept)!r},\n"
        "    progress=lambda done, total: said.append(done))\n"
        "print(dataset.cost_index.fingerprint, dataset.cost_index.folder)"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {rank.communicate(timeout=180)[0].strip() for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert len(said) == 1
    assert said.pop().endswith(f" {kept}")
    assert [path.name for path in kept.parent.iterdir()] == ["index"], "nothing is left beside it"
    scans: list[int] = []
    again = SampleDataset.open(small_shard, DEMO_PROCESSOR, index=kept, progress=lambda done, _: scans.append(done))
    assert not scans, "a current index is not built again"
    assert again.cost_index.folder == kept
    alike = SampleDataset.open(small_shard, DEMO_PROCESSOR)
    assert again.cost_index.fingerprint == alike.cost_index.fingerprint


def test_an_index_of_other_options_is_built_anew_and_a_foreign_folder_is_kept(
    small_shard: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "index"
    first = SampleDataset.open(small_shard, DEMO_PROCESSOR, index=kept)
    second = SampleDataset.open(small_shard, DEMO_PROCESSOR, index=kept, train_on="all")
    assert second.cost_index.samples["label_tokens"].sum() > first.cost_index.samples["label_tokens"].sum()
    assert second[0].labels.tolist() != first[0].labels.tolist()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("mine")
    with pytest.raises(IndexFormatError, match=r"holds something else and is not overwritten \(letter.txt\)"):
        SampleDataset.open(small_shard, DEMO_PROCESSOR, index=tmp_path / "home")


def test_a_medium_that_does_not_decode_makes_a_zero_loss_stand_in(
    write_shard: Callable[..., Path],
    chat_json: Callable[..., bytes],
    image_bytes: Callable[..., bytes],
    tmp_path: Path,
) -> None:
    picture = image_bytes(120, 80)
    shard = write_shard(
        tmp_path / "cut.tar",
        [
            ("0.json", chat_json("<image>What?", "A red one.")),
            ("0.png", picture[:100] + bytes(len(picture) - 100)),  # the header is whole, the pixels are not
            ("1.json", chat_json("And?", "Nothing.")),
        ],
    )
    dataset = SampleDataset.open(shard, DEMO_PROCESSOR)
    sample = dataset[0]
    assert sample.replaced is not None
    assert sample.replaced.startswith("corrupt: ")
    assert "key 0" in sample.replaced
    assert set(sample.labels.tolist()) == {-100}
    assert not sample.patches.any()
    assert len(sample.tokens) == dataset.cost_index.samples["llm_tokens"][0]
    assert dataset[1].replaced is None


def test_unusable_samples_are_told_and_raise_when_they_are_asked_for(
    write_shard: Callable[..., Path],
    chat_json: Callable[..., bytes],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shard = write_shard(tmp_path / "bad.tar", [("0.json", chat_json("Hi?", "Yes.")), ("1.json", b"{")])
    with caplog.at_level("WARNING", logger="balancer.sample_dataset"):
        dataset = SampleDataset.open(shard, DEMO_PROCESSOR, bad_records="skip")
    assert "1 of 2 samples cannot be used:" in caplog.text
    assert "key 1" in caplog.text
    assert repr(dataset) == "SampleDataset(2 samples, 1 of them unusable)"
    with pytest.raises(DataError):
        dataset[1]
    with pytest.raises(DataError, match=r"(?s)1 of 2 samples cannot be used.*key 1.*media_root.*bad_records='skip'"):
        SampleDataset.open(shard, DEMO_PROCESSOR)
    with pytest.raises(DataError, match="bad_records='drop': choose one of error, skip"):
        SampleDataset.open(shard, DEMO_PROCESSOR, bad_records="drop")  # type: ignore[arg-type]


def test_a_shard_that_is_gone_raises(small_shard: Path, tmp_path: Path) -> None:
    copy = shutil.copy(small_shard, tmp_path / "copy.tar")
    dataset = pickle.loads(pickle.dumps(SampleDataset.open(copy, DEMO_PROCESSOR)))
    Path(copy).unlink()
    with pytest.raises((OSError, SourceError), match=r"copy\.tar"):
        dataset[0]


def test_a_folder_without_tokenizer_files_means_bytes(
    small_shard: Path, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="balancer.sample_dataset"):
        dataset = SampleDataset.open(small_shard, model_folder, train_on="last")
    assert "the model has no tokenizer files: one byte is one token" in caplog.text
    assert dataset.reader.encoder == ByteEncoder(train_on="last")
    assert dataset.placeholder_ids == (Special.IMAGE_PAD, Special.VIDEO_PAD)


def test_a_folder_with_a_tokenizer_gives_its_tokens_and_placeholders(small_shard: Path, model_folder: Path) -> None:
    add_tokenizer(model_folder)
    dataset = SampleDataset.open(small_shard, model_folder)
    encoder = dataset.reader.encoder
    assert isinstance(encoder, TemplateEncoder)
    image_id, video_id = dataset.placeholder_ids
    assert (image_id, video_id) == (SPECIALS.index("<|image_pad|>"), SPECIALS.index("<|video_pad|>"))
    for i in range(6):
        sample = dataset[i]
        assert len(sample.tokens) == dataset.cost_index.samples["llm_tokens"][i]
        assert set(sample.tokens[sample.visual_index].tolist()) <= {image_id, video_id}
    assert set(dataset[1].tokens[dataset[1].visual_index].tolist()) == {image_id}
    assert set(dataset[3].tokens[dataset[3].visual_index].tolist()) == {video_id}


def test_tokenizer_files_of_an_old_kind_are_not_passed_over_in_silence(small_shard: Path, model_folder: Path) -> None:
    (model_folder / "vocab.json").write_text("{}")
    with pytest.raises(DataError, match=r"no tokenizer.json at .*save_pretrained"):
        SampleDataset.open(small_shard, model_folder)


def test_a_reader_of_ones_own_makes_a_dataset(small_shard: Path) -> None:
    source, estimator = TarSource([str(small_shard)]), estimator_from_config(DEMO_PROCESSOR)
    index = scan_source(source, estimator)
    dataset = SampleDataset(SampleReader(source=source, index=index, estimator=estimator, with_pixels=False))
    assert dataset[1].patches.shape == (0, dataset.patch_dim)
    assert dataset.placeholder_ids == (Special.IMAGE_PAD, Special.VIDEO_PAD)
    assert isinstance(dataset.cost_index, CostIndex)


@pytest.mark.parametrize(
    ("data", "model", "error", "text"),
    [
        ("missing.tar", DEMO_PROCESSOR, SourceError, r"missing\.tar"),
        ("notes.txt", DEMO_PROCESSOR, SourceError, "is no known source|no file"),
        (None, {"config": {"model_type": "of nobody"}}, DataError, "no estimator for 'of nobody'"),
        (None, "no/such/model", DataError, "no/such/model"),
        (None, {"config": {"model_type": "llava_next"}}, DataError, "can be costed but not loaded|options"),
    ],
)
def test_what_cannot_be_opened_says_why(
    small_shard: Path, data: str | None, model: object, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        SampleDataset.open(data or small_shard, model)  # type: ignore[arg-type]


def test_a_train_on_that_does_not_exist_is_refused(small_shard: Path) -> None:
    with pytest.raises(DataError, match=r"train_on='some' at ByteEncoder\. Choose one of assistant, last, all"):
        SampleDataset.open(small_shard, DEMO_PROCESSOR, train_on="some")
