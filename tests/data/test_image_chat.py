"""Conversations with images: learned tokens, image tensors, order and refused rows."""

import inspect
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from PIL import Image

from lightning_ptdp import PTDPStrategy
from lightning_ptdp.data import ImageChatDataModule, TokenizerError, TokenLoader, chat_build
from lightning_ptdp.data.data_error import CorpusError, StoreError
from lightning_ptdp.models import LitImageTextToText, make_tiny
from lightning_ptdp.models.tiny import make_tiny_vision, tiny_tokenizer
from tests.data.folders import write_rows
from tests.huggingface.vision import FAMILIES, build_vision

pytestmark = pytest.mark.thorough

transformers = pytest.importorskip("transformers")

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]"
    "{% for part in message['content'] %}"
    "{{ 'IMAGE' if part['type'] == 'image' else part['text'] }}{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SPECIAL = ("<image>", "<start_of_image>", "<end_of_image>")


def make_processor(family, *special):
    """Return a processor of a family: 4 tokens for an image of 8 x 8 pixels in patches of 4."""
    names = dict(zip(("image_token", "boi_token", "eoi_token"), SPECIAL, strict=True))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(300, *special, *SPECIAL, "<|video_pad|>").backend_tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=names,
    )
    side = {"height": 8, "width": 8}
    place = "<start_of_image>" if family == "gemma3" else "<image>"
    more = {"chat_template": TEMPLATE.replace("IMAGE", place)}
    match family:
        case "llava":
            more |= {"patch_size": 4, "vision_feature_select_strategy": "default"}
            images = transformers.CLIPImageProcessor(size=side, crop_size=side)
            return transformers.LlavaProcessor(
                images, tokenizer, num_additional_image_tokens=1, **more
            )
        case "qwen2_5_vl":
            images = transformers.Qwen2VLImageProcessor(
                patch_size=4, merge_size=2, min_pixels=64, max_pixels=256
            )
            video = transformers.Qwen2VLVideoProcessor()
            return transformers.Qwen2_5_VLProcessor(images, tokenizer, video, **more)
        case "paligemma":
            images = transformers.SiglipImageProcessor(size=side, image_seq_length=4)
            return transformers.PaliGemmaProcessor(images, tokenizer, **more)
        case "idefics3":
            images = transformers.Idefics3ImageProcessor(
                size={"longest_edge": 16}, max_image_size={"longest_edge": 8}
            )
            return transformers.Idefics3Processor(images, tokenizer, image_seq_len=4, **more)
    images = transformers.Gemma3ImageProcessor(size=side)
    return transformers.Gemma3Processor(images, tokenizer, image_seq_length=4, **more)


def message(role, *content):
    parts = [
        {"type": "image", "path": part} if part.endswith(".png") else {"type": "text", "text": part}
        for part in content
    ]
    return {"role": role, "content": parts}


def row(number, *images):
    """Return a row with the images in the first and the third message."""
    first, *others = [message("user", *images[:1], f"Question {number}?")]
    last = message("user", "And", *images[1:], "now?")
    answers = [message("assistant", f"Answer {number}."), message("assistant", "The last.")]
    return {"messages": [first, *others, answers[0], last, answers[1]]}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for number in range(3):
        Image.new("RGB", (8 + 4 * number, 8), (80 * number, 20, 90)).save(folder / f"{number}.png")
    (folder / "text.png").write_text("no image")
    make_tiny_vision(folder / "model")
    make_tiny(folder / "text", vocabulary_size=300, hidden_size=16, intermediate_size=16)
    make_processor("llava", "<one more>").save_pretrained(folder / "other")
    return folder


@pytest.fixture
def data(images):
    """Return a factory of data modules for rows."""

    def make(rows, **changes):
        number = len(list(images.glob("*.jsonl")))
        write_rows(images / f"{number}.jsonl", rows)
        settings = {
            "path": str(images / f"{number}.jsonl"),
            "data_dir": str(images / f"store{number}"),
            "tokenizer_dir": str(images / "model"),
            "sequence_length": 256,
            "micro_batch_size": 4,
            "validation_fraction": 0.2,
        }
        return ImageChatDataModule(**settings | changes)

    return make


ROWS = [row(0), row(1, "0.png"), row(2, "1.png", "2.png"), row(3), row(4, "2.png"), row(5)]


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_are_those_of_processor(family, data, images):
    """Ids, pixels and learned answers of a batch equal the processor's; its model computes them."""
    processor = make_processor(family)
    processor.save_pretrained(images / family)
    module = data(ROWS, tokenizer_dir=str(images / family))
    module.check()
    module.prepare_data()
    stream = module._stream("train")
    assert len(stream) == 5
    batch = stream.as_batch(stream.__getitems__([0, 1, 2, 3]))
    pixels = []
    for index in range(4):
        ids, labels = batch["input_ids"][index], batch["labels"][index]
        text = processor.tokenizer.decode(ids)
        (number,) = (n for n in range(6) if f"Question {n}?" in text)
        learned = processor.tokenizer.decode(labels[labels >= 0])
        assert learned == f"Answer {number}.</s>The last.</s>"
        begins = (labels >= 0).nonzero()[0]
        assert ids[: begins + 1].tolist()[-1] == processor.tokenizer.encode("]")[-1]
        if family == "paligemma":  # its processor adds text to that of the template
            continue
        conversation = [
            {**one, "content": [absolute(part, images) for part in one["content"]]}
            for one in ROWS[number]["messages"]
        ]
        expected = processor.apply_chat_template(
            conversation, tokenize=True, return_dict=True, return_tensors="pt"
        )
        size = expected["input_ids"].size(1) - 1
        assert ids[:size].equal(expected["input_ids"][0, :-1])
        if family == "idefics3":  # It has the samples along dimension 0, and pads their images.
            shown = expected.get("pixel_values", torch.zeros(1, 0, 3, 8, 8))[0]
            # torchvision 0.26 rounds images of a batch in another way.
            torch.testing.assert_close(batch["pixel_values"][index, : len(shown)], shown)
            assert not batch["pixel_values"][index, len(shown) :].any()
        elif "pixel_values" in expected:
            pixels.append(expected["pixel_values"])
    if pixels:
        assert batch["pixel_values"].equal(torch.cat(pixels))

    model = build_vision(family)
    model.resize_token_embeddings(len(processor.tokenizer))
    model.config.image_token_id = processor.image_token_ids[0]
    wanted = inspect.signature(type(model).forward).parameters
    accepted = {name: batch[name] for name in batch if name in wanted and name != "labels"}
    assert model(**accepted).logits.isfinite().all()


def absolute(part, folder):
    return {**part, "path": str(folder / part["path"])} if "path" in part else part


def test_order_and_images_do_not_depend_on_replicas_workers_or_resume(data):
    rows = [row(number, *(["1.png"] if number % 3 else [])) for number in range(20)]
    module = data(rows)
    module.prepare_data()
    stream = module._stream("train")
    whole = iter(TokenLoader(stream, batch_size=4, seed=3))
    parts = [
        iter(TokenLoader(stream, batch_size=2, seed=3, num_replicas=2, replica_rank=rank))
        for rank in (0, 1)
    ]
    resumed = TokenLoader(stream, batch_size=4, seed=3, num_workers=1)
    resumed.load_state_dict({**resumed.state_dict(), "consumed_samples": 4})
    first, second = next(whole), next(whole)
    joined = [next(part) for part in parts]
    for name in ("input_ids", "labels", "pixel_values"):
        assert torch.cat([part[name] for part in joined]).equal(first[name])
    again = next(iter(resumed))
    assert again.keys() == second.keys()
    assert all(again[name].equal(second[name]) for name in second)


def test_batch_without_images_has_no_image_tensors(data):
    module = data([row(number) for number in range(6)])
    module.prepare_data()
    assert next(iter(module.train_dataloader())).keys() == {
        "input_ids",
        "labels",
        "token_type_ids",
    }


def picture(path):
    return {"role": "user", "content": [{"type": "image", "path": path}]}


QUESTION, ANSWER = message("user", "0.png", "What?"), message("assistant", "This.")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([message("user", "gone.png"), ANSWER], r"gone\.png is not a file. Paths are relative"),
        ([message("user", "text.png"), ANSWER], r"text\.png is broken \(UnidentifiedImageError\)"),
        ([message("user", *["0.png"] * 3), ANSWER], "3 images, more than max_images=2"),
        ([QUESTION], "no message has the role assistant"),
        ([QUESTION, message("assistant", "0.png")], "message 2, an answer, is empty"),
        ([{"role": "user", "content": [{"type": "video"}]}, ANSWER], "message 1 .* type 'video'"),
        ([{"role": "user", "content": [{"type": "image"}]}, ANSWER], "an image has no path"),
        ([picture("data:image/png;base64,abc"), ANSWER], r"base64,abc is broken \(Error\)"),
        ([picture("a" * 5000), ANSWER], "image a+ is not a file"),
    ],
)
def test_faulty_row_is_refused_before_launch(messages, reason, data, monkeypatch):
    monkeypatch.setattr(chat_build, "ROWS_AT_ONCE", 2)  # tokenized before launch
    rows = [{"messages": [message("user", "What?"), ANSWER]}] * 2 + [{"messages": messages}]
    module = data(rows, max_images=2)
    with pytest.raises(CorpusError, match=rf"{module.prepare_config.path}, row 3: .*{reason}"):
        module.check()
    data(rows, max_images=2, faulty="drop").check()


def test_image_place_in_text_is_refused(data):
    rows = [{"messages": [message("user", "0.png", "<image>?"), ANSWER]}]
    with pytest.raises(CorpusError, match=r"row 1: it has 1 images, but .* has 2 places"):
        data(rows).check()


def test_too_long_samples_are_refused_or_dropped_with_their_number(data):
    rows = [row(number, "0.png") for number in range(9)]
    rows += [{"messages": [message("user", "Why? " * 200), ANSWER]}]
    module = data(rows)
    with pytest.raises(StoreError, match=r"1 of . .* samples are longer than .*or too_long: drop$"):
        module.prepare_data()
    with pytest.raises(ValueError, match="too_long='cut' would cut images"):
        data(rows, too_long="cut")


def test_changed_or_missing_image_is_refused_while_reading(data, images):
    Image.new("RGB", (8, 8)).save(images / "changing.png")
    module = data([row(number, "changing.png") for number in range(6)])
    module.prepare_data()
    loader = module.train_dataloader()
    Image.new("RGB", (80, 80), (1, 2, 3)).save(images / "changing.png")
    with pytest.raises(StoreError, match=r"changing\.png has changed or is gone since"):
        next(iter(loader))


def test_processor_of_other_model_is_refused(data, images):
    with pytest.raises(TokenizerError, match="has no processor for images, only a "):
        data(ROWS, tokenizer_dir=str(images / "text")).check()
    other = images / "other"
    with pytest.raises(ValueError, match=r"processor of the data .* \[6\].* image_token_id="):
        LitImageTextToText(str(images / "model")).check_data(data(ROWS, tokenizer_dir=str(other)))


@pytest.mark.parametrize(
    ("processor", "error"),
    [
        ("other", r"processor of the data .* image_token_id="),
        ("text", "has no processor for image"),
    ],
)
def test_fit_refuses_processor_of_other_model_before_launch(
    processor, error, data, images, monkeypatch
):
    def refuse(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", refuse)
    trainer = Trainer(
        strategy=PTDPStrategy(tensor_parallel_size=2),
        accelerator="cpu",
        devices=2,
        logger=False,
        enable_checkpointing=False,
    )
    module = data(ROWS, tokenizer_dir=str(images / processor))
    with pytest.raises(ValueError, match=error):
        trainer.fit(LitImageTextToText(str(images / "model")), datamodule=module)
    assert not Path(module.data_dir).exists(), "the data were prepared"


def test_model_gets_tensors_that_its_forward_names(images):
    """LLaVA has no token types."""
    module = LitImageTextToText(str(images / "model"))
    with torch.device("meta"):
        module.configure_model()
    given = []
    module.model.forward = lambda **inputs: given.extend(inputs)
    module._run(input_ids=1, token_type_ids=2, pixel_values=3)
    assert given == ["input_ids", "pixel_values"]
