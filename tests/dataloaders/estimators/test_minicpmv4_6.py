"""MiniCPM-V 4.6: images as the installed processor cuts them; videos as its video processor samples and stacks them."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dataloaders.errors import DataError, MediaError, Reason, UnfitError
from dataloaders.estimators import estimator_from_config
from dataloaders.estimators.minicpmv4_6 import MiniCPMV46Config, MiniCPMV46Estimator, TileOptions

SIZES = [(1, 1), (3, 1), (1, 300), (448, 448), (449, 448), (640, 480), (1000, 250), (800, 700), (233, 1199)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_slice_nums": 4, "downsample_mode": "4x"},
    {"slice_mode": False},
    {"scale_resolution": 224, "max_slice_nums": 16},
    {"patch_size": 16, "scale_resolution": 512, "max_slice_nums": 1},
]
SYMBOLS = {
    "image_token": "v",
    "video_token": "v",
    "image_start_token": "(",
    "image_end_token": ")",
    "slice_start_token": "[",
    "slice_end_token": "]",
}


@pytest.mark.parametrize("options", OPTIONS)
def test_images_cost_what_the_installed_processor_makes_of_them(options: dict[str, Any]) -> None:
    images = pytest.importorskip("transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6")
    processing = pytest.importorskip("transformers.models.minicpmv4_6.processing_minicpmv4_6")
    estimator = estimator_from_config({"model_type": "minicpmv4_6", **options})
    made = images.MiniCPMV4_6ImageProcessorPil(**options)([Image.new("RGB", size) for size in SIZES])
    divisor = 4 if options.get("downsample_mode") == "4x" else 16
    writer = SimpleNamespace(**SYMBOLS, slice_mode=options.get("slice_mode", True))
    first = 0
    for index, size in enumerate(SIZES):
        text = processing.MiniCPMV4_6Processor.replace_image_token(
            writer, made, image_idx=index, image_token_divisor=divisor
        )
        counts = estimator.image(*size)
        tiles = made["target_sizes"][first : first + made["num_patches_per_image"][index]]
        first += len(tiles)
        assert counts.llm_tokens == len(text), size
        assert counts.visual_tokens == text.count("v"), size
        assert counts.patches == counts.full.total == int(tiles.prod(-1).sum()), size
        assert counts.tiles == counts.full.count == len(tiles), size


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        ((224, 224), 66),
        ((640, 480), 209),
        ((1024, 768), 326),
        ((1920, 1080), 597),
        ((2480, 3508), 595),
        ((3000, 300), 449),
        ((1, 1), 66),
    ],
)
def test_golden_images(size: tuple[int, int], tokens: int) -> None:
    assert MiniCPMV46Estimator().image(*size).llm_tokens == tokens


@pytest.mark.parametrize(
    ("clip", "tokens"),
    [
        ((640, 360, 150, 30.0, 5.0), 1000),
        ((1280, 720, 300, 30.0, 10.0), 4590),
        ((320, 180, 1803, 30.0, 60.1), 4148),
        ((640, 360, 7200, 30.0, 240.0), 25600),
        ((640, 360, 54000, 30.0, 1800.0), 25600),
    ],
)
def test_golden_videos(clip: tuple[int, int, int, float, float], tokens: int) -> None:
    counts = MiniCPMV46Estimator().video(*clip)
    assert counts.llm_tokens == tokens
    assert counts.frames == len(MiniCPMV46Estimator().frame_indices(*clip[2:]))


CLIPS = [
    (640, 360, 75, 29.97, 75 / 29.97),
    (320, 568, 1, 30.0, 1 / 30),
    (100, 100, 10, 2.5, 4.0),
    (700, 320, 290, 29.0, 10.0),
    (120, 80, 14_000, 10.0, 1400.0),
    (333, 200, 400, 100.0, 4.0),
]
VIDEO_OPTIONS: list[dict[str, Any]] = [
    {},
    {"stack_frames": 3, "max_num_frames": 6},
    {"stack_frames": 4},
    {"stack_frames": 5, "max_num_frames": 3, "max_slice_nums": 4},
    {"stack_frames": 7, "slice_mode": False},
    {"downsample_mode": "4x", "max_slice_nums": 2, "max_num_frames": 3},
]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context")  # numpy on tensors, in the processor
@pytest.mark.parametrize("options", VIDEO_OPTIONS)
@pytest.mark.parametrize("clip", CLIPS)
def test_videos_cost_what_the_installed_processor_makes_of_them(
    clip: tuple[int, int, int, float, float], options: dict[str, Any]
) -> None:
    torch = pytest.importorskip("torch")
    videos = pytest.importorskip("transformers.models.minicpmv4_6.video_processing_minicpmv4_6")
    processing = pytest.importorskip("transformers.models.minicpmv4_6.processing_minicpmv4_6")
    metadata = pytest.importorskip("transformers.video_utils").VideoMetadata

    class Blank(videos.MiniCPMV4_6VideoProcessor):  # type: ignore[misc, name-defined]
        """The processor with its two steps that need torchvision done on blank pixels of the right sizes."""

        def resize(self, video: Any, size: Any, resample: Any = None, **kwargs: Any) -> Any:
            return torch.zeros((*video.shape[:-2], size.height, size.width), dtype=torch.uint8)

        def rescale_and_normalize(self, video: Any, *args: Any) -> Any:
            return video.float()

    width, height, num_frames, fps, duration = clip
    about = metadata(total_num_frames=num_frames, fps=fps, duration=duration, width=width, height=height)
    settings_ = {name: getattr(Blank, name) for name in Blank.valid_kwargs.__annotations__ if hasattr(Blank, name)}
    settings_ |= options
    processor = Blank()
    taken = processor.sample_frames(about, settings_["max_num_frames"], settings_["stack_frames"])
    frames = torch.zeros((len(taken), 3, height, width), dtype=torch.uint8)
    made = processor._preprocess(
        videos=[frames], video_metadata=[about], return_tensors="pt", rescale_factor=1.0,
        **{name: settings_.get(name) for name in (
            "do_resize", "resample", "do_rescale", "do_normalize", "image_mean", "image_std", "max_slice_nums",
            "scale_resolution", "patch_size", "slice_mode", "stack_frames", "max_num_frames", "downsample_mode",
        )},
    )  # fmt: skip
    writer = SimpleNamespace(**SYMBOLS, video_slice_mode=settings_["slice_mode"])
    text = processing.MiniCPMV4_6Processor.replace_video_token(
        writer, made, video_idx=0, video_token_divisor=4 if settings_["downsample_mode"] == "4x" else 16
    )

    estimator = estimator_from_config({"config": {"model_type": "minicpmv4_6"}, "video_preprocessor_config": options})
    counts = estimator.video(*clip)
    assert (counts.llm_tokens, counts.visual_tokens) == (len(text), text.count("v"))
    assert counts.patches == int(made["target_sizes_videos"].prod(-1).sum())
    assert counts.frames == made["num_frames_per_video"][0]
    assert estimator.frame_indices(num_frames, fps, duration).tolist() == sorted(taken)


def refusal(estimator: MiniCPMV46Estimator, num_frames: int, fps: float, duration: float) -> UnfitError | None:
    """The error of a video of these frames, if there is one."""
    try:
        estimator.frame_indices(num_frames, fps, duration)
    except UnfitError as error:
        return error
    return None


tiles = st.builds(
    TileOptions,
    max_slices=st.integers(1, 12),
    scale_px=st.sampled_from([224, 448]),
    slice_mode=st.booleans(),
    merge=st.sampled_from([2, 4]),
)
configs = st.builds(
    MiniCPMV46Config,
    image=tiles,
    video=tiles,
    max_frames=st.integers(1, 40),
    stack_frames=st.integers(1, 5),
    use_image_id=st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.integers(1, 2000),
    st.floats(0.5, 120.0),
    configs,
)
def test_the_last_line_of_an_explanation_has_the_tokens(
    width: int, height: int, num_frames: int, fps: float, config: MiniCPMV46Config
) -> None:
    estimator = MiniCPMV46Estimator(config)
    image = estimator.image(width, height)
    assert estimator.explain_image(width, height)[-1].endswith(f"= {image.llm_tokens}")
    assert image.visual_tokens < image.llm_tokens
    clip = (num_frames, fps, num_frames / fps)
    error = refusal(estimator, *clip)
    if error is not None:  # a rate at which num_frames / fps is rounded up
        assert error.nearest_frames == num_frames + 1
        return
    video = estimator.video(width, height, *clip)
    assert estimator.explain_video(width, height, *clip)[-1].endswith(f"= {video.llm_tokens}")
    assert video.patches == video.full.total
    indices = estimator.frame_indices(*clip)
    assert list(indices) == sorted(indices)
    assert indices[0] == 0
    assert indices[-1] < num_frames


@settings(max_examples=60, deadline=None)
@given(st.integers(-1, 300), st.floats(1.0, 60.0), st.floats(0.1, 300.0))
def test_the_nearest_number_of_frames_of_a_refused_clip_is_taken(num_frames: int, fps: float, duration: float) -> None:
    estimator = MiniCPMV46Estimator()
    error = refusal(estimator, num_frames, fps, duration)
    if error is not None:
        assert error.reason is Reason.TOO_FEW_FRAMES
        assert error.nearest_frames is not None
        assert error.nearest_frames > num_frames
        estimator.video(320, 240, error.nearest_frames, fps, duration)


def test_a_duration_past_the_last_frame_is_refused() -> None:
    with pytest.raises(UnfitError, match="need frame 120, there are 100") as caught:
        MiniCPMV46Estimator().video(320, 240, 100, 30.0, 5.0)
    assert caught.value.nearest_frames == 121


def test_a_rate_or_a_duration_follows_from_the_other() -> None:
    estimator = MiniCPMV46Estimator()
    expected = estimator.video(320, 240, 100, 20.0, 5.0)
    assert estimator.video(320, 240, 100, 0.0, 5.0) == expected
    assert estimator.video(320, 240, 100, 20.0, float("nan")) == expected
    with pytest.raises(MediaError) as caught:
        estimator.video(320, 240, 100, 0.0, 0.0)
    assert caught.value.reason is Reason.CORRUPT


def test_without_sampling_every_frame_is_used() -> None:
    estimator = MiniCPMV46Estimator(MiniCPMV46Config(sample_frames=False))
    assert estimator.video(320, 180, 7, 30.0, 7 / 30).frames == 7
    assert estimator.frame_indices(7, 30.0, 7 / 30).tolist() == list(range(7))


def test_ids_are_counted_where_the_configuration_says_so() -> None:
    image = {"preprocessor_config": {"image_processor_type": "MiniCPMV4_6ImageProcessorFast", "use_image_id": True}}
    estimator = estimator_from_config(image)
    assert estimator.image(224, 224).llm_tokens == 66 + 3
    assert estimator.image(224, 224, num_images=101).llm_tokens == 66 + 5
    assert estimator.video(640, 360, 150, 30.0, 5.0).llm_tokens == 1000 + 3
    off = {**image, "processor_config": {"processor_class": "MiniCPMV4_6Processor", "use_image_id": False}}
    assert estimator_from_config(off).image(224, 224).llm_tokens == 66


def test_what_the_rule_does_not_cover_is_refused() -> None:
    for options, message in (
        ({"downsample_mode": "8x"}, "downsample_mode='8x'"),
        ({"do_resize": False}, "do_resize is false"),
        ({"max_slice_nums": 0}, "max_slices=0"),
    ):
        with pytest.raises(DataError, match=re.escape(message)):
            estimator_from_config({"model_type": "minicpmv4_6", **options})
    with pytest.raises(DataError, match="which frames are stacked is not known"):
        MiniCPMV46Config(stack_frames=2, sample_frames=False)
    with pytest.raises(UnfitError) as caught:
        MiniCPMV46Estimator().image(10, 0)
    assert caught.value.nearest_size_px == (10, 1)
