"""Features of a tiny random DINOv2, made on the spot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import stoker
from stoker.encoders.features import FeatureEncoder
from stoker.errors import EncoderError
from stoker.schema import Field, Schema
from stoker.store import make_recipe
from stoker.testing import check_encoder
from tests.encoders.tiny_dinov2 import MEAN, PROCESSOR, STD, make_model
from tests.sources.images.pictures import encoded, square

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: pip install 'stoker[features]'"
)

SAMPLES: Schema = {
    "image": Field(shape=(3, 28, 42), dtype="uint8"),
    "boxes": Field(shape=(2, 4), dtype="float32"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("dinov2"))


def images(count: int = 3) -> torch.Tensor:
    random = np.random.default_rng(0).integers(0, 256, (count, 3, 28, 42), np.uint8)
    return torch.from_numpy(random)


def tokens_of(folder: Path, pixels: torch.Tensor) -> torch.Tensor:
    """What the model gives when it is used by its own means."""
    from transformers import AutoModel

    with torch.inference_mode():
        return AutoModel.from_pretrained(folder).eval()(pixel_values=pixels).last_hidden_state


def normalized() -> torch.Tensor:
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    return (images() / 255 - mean) / std


@pytest.mark.parametrize("pooling", ["cls", "mean", "tokens"])
@pytest.mark.parametrize("registers", [0, 4])
def test_features_are_those_of_the_model(tmp_path: Path, pooling: str, registers: int) -> None:
    folder = make_model(tmp_path, registers)
    batch = {"image": images(), "boxes": torch.ones(3, 2, 4)}

    found = FeatureEncoder(folder, pooling).encode(batch)

    tokens = tokens_of(folder, normalized())
    assert tokens.shape == (3, 1 + registers + 2 * 3, 16)
    patches = tokens[:, 1 + registers :]
    wanted = {"cls": tokens[:, 0], "mean": patches.mean(1), "tokens": tokens}[pooling]
    assert torch.allclose(found["features"], wanted, atol=1e-5)
    assert torch.equal(found["boxes"], batch["boxes"])
    assert "image" not in found


@pytest.mark.parametrize("processor", ["device", "pil"])
def test_features_do_not_depend_on_the_default_device_or_dtype(folder: Path, processor: str) -> None:
    """`meta` stands for a GPU: whatever lands there by mistake has no values."""
    expected = FeatureEncoder(folder, processor=processor).encode({"image": images()})["features"]
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = FeatureEncoder(folder, processor=processor).encode({"image": images()})["features"]
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)

    assert torch.equal(found, expected)


@pytest.mark.parametrize("processor", ["device", "pil"])
def test_it_keeps_the_promises_of_an_encoder(folder: Path, processor: str) -> None:
    encoder = FeatureEncoder(folder, "tokens", processor=processor, encode_batch=3)

    check_encoder(encoder, SAMPLES)

    tokens = 1 + (2 * 3 if processor == "device" else 2 * 2)
    assert encoder.schema(SAMPLES)["features"] == Field(shape=(tokens, 16), dtype="float32")


def test_the_models_own_processor_resizes_and_crops(folder: Path) -> None:
    from transformers import BitImageProcessorPil

    processor = BitImageProcessorPil.from_pretrained(folder)
    pixels = processor(images=list(images().numpy()), return_tensors="pt", input_data_format="channels_first")

    found = FeatureEncoder(folder, processor="pil").encode({"image": images()})

    assert pixels["pixel_values"].shape == (3, 3, 28, 28)
    assert torch.allclose(found["features"], tokens_of(folder, pixels["pixel_values"])[:, 0], atol=1e-5)


def test_the_identity_names_weights_processor_and_pooling_but_no_place(folder: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    first = FeatureEncoder(folder).identity()

    assert FeatureEncoder(moved).identity() == first
    others = [
        FeatureEncoder(folder, "mean").identity(),
        FeatureEncoder(folder, processor="pil").identity(),
    ]
    (moved / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, "image_mean": [0.5] * 3}))
    others.append(FeatureEncoder(moved).identity())
    others.append(FeatureEncoder(make_model(tmp_path / "other", 4)).identity())
    assert all(other != first for other in others)
    assert "pillow" in str(others[1]["config"])


def test_a_cache_that_is_ready_is_found_without_loading_the_model(folder: Path) -> None:
    """Importing transformers takes seconds, and a second start should take none."""
    program = (
        "import sys; from stoker.encoders.features import FeatureEncoder; from stoker.schema import Field\n"
        f"e = FeatureEncoder({str(folder)!r}); e.identity()\n"
        "e.schema({'image': Field(shape=(3, 28, 28), dtype='uint8')})\n"
        "assert 'transformers' not in sys.modules"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_network_is_never_asked(folder: Path) -> None:
    program = (
        "import socket, torch\n"
        "def refuse(*a, **k): raise SystemExit('asked the network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from stoker.encoders.features import FeatureEncoder\n"
        "for processor in ('device', 'pil'):\n"
        f"    e = FeatureEncoder({str(folder)!r}, processor=processor)\n"
        "    print(e.encode({'image': torch.zeros(1, 3, 28, 28, dtype=torch.uint8)})['features'].shape)\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=170)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch.Size([1, 16])") == 2


def test_images_become_features_with_their_labels_beside_them(folder: Path, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for k in range(3):
            data = encoded(square((60, 80), (k, k, 40, 40)))
            (tmp_path / "images" / name / f"{k}.png").write_bytes(data)
    source = stoker.ImageSource(tmp_path / "images", "folder", size=(28, 42))

    cache = stoker.precompute(
        source, FeatureEncoder(folder), tmp_path / "cache", name="c", workers=1, keep=("image",)
    )

    assert cache.complete
    assert {name: tuple(value.shape) for name, value in cache[4].items()} == {
        "features": (16,), "label": (), "original_size": (2,), "image": (3, 28, 42),
    }  # fmt: skip
    assert [int(cache[n]["label"]) for n in range(6)] == [0, 0, 0, 1, 1, 1]
    assert make_recipe(source, FeatureEncoder(folder, "mean")).fingerprint != cache.fingerprint


def lose_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["embeddings.cls_token"]
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (shutil.rmtree, "config.json cannot be read.*save_pretrained"),
        (lambda folder: (folder / "preprocessor_config.json").unlink(), "preprocessor_config.json cannot"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
        (lambda folder: edit(folder, "config.json", patch_size=None), "has no patch_size"),
        (lambda folder: edit(folder, "config.json", model_type="novel"), "no model that transformers knows"),
        (lambda folder: edit(folder, "preprocessor_config.json", image_mean=None), "lacks image_mean"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "m.bin"), "no .*safetensors.*m.bin"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "cannot be read as weights"),
        (lose_weight, "lacks 1 weights.*cls_token.*random"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(folder: Path, tmp_path: Path, spoil, says: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    spoil(copy)

    with pytest.raises(EncoderError, match=f"(?s){says}"):
        FeatureEncoder(copy).encode({"image": images()})


def edit(folder: Path, name: str, **entries: object) -> None:
    content = {**json.loads((folder / name).read_text()), **entries}
    (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ({"picture": SAMPLES["image"]}, "no field 'image', only .'picture'."),
        ({"image": Field(shape=(3, 28, 28), dtype="float32")}, r"float32 \(3, 28, 28\)"),
        ({"image": Field(shape=(3, 30, 44), dtype="uint8")}, r"30 x 44.*14 x 14.*size=\(28, 42\)"),
        ({**SAMPLES, "features": SAMPLES["boxes"]}, "'features' already"),
    ],
)
def test_samples_that_do_not_fit_are_refused_with_the_cure(folder: Path, samples, says: str) -> None:
    with pytest.raises(EncoderError, match=says):
        FeatureEncoder(folder).schema(samples)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """As much of the Hugging Face Hub as a download asks for."""

    folder: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        self.asked.append(self.path)
        name = self.path.rpartition("/")[2]
        path = self.folder / name
        if self.path.startswith("/api/models/me/tiny/tree/"):
            data = json.dumps(
                [
                    {"type": "file", "path": one.name, "oid": one.name, "size": one.stat().st_size}
                    for one in self.folder.iterdir()
                ]
            ).encode()
        elif self.path.startswith("/api/models/me/tiny"):
            files = [{"rfilename": one.name} for one in self.folder.iterdir()]
            data = json.dumps({"id": "me/tiny", "sha": COMMIT, "siblings": files}).encode()
        elif "/me/tiny/resolve/" in self.path and path.is_file():
            data = path.read_bytes()
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{name}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.slow
def test_a_model_of_the_hub_is_downloaded_when_asked_for_and_then_found_offline(
    folder: Path, tmp_path: Path
) -> None:
    Hub.folder, Hub.asked = folder, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        **{name: value for name, value in os.environ.items() if "proxy" not in name.lower()},
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
    }

    def ask(call: str, **more: str) -> str:
        code = (
            "import stoker, sys\n"
            f"try: print(stoker.{call}.identity()['weights'])\n"
            "except stoker.errors.EncoderError as error: print(error)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, **more},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    try:
        assert "download=True" in ask("FeatureEncoder('me/tiny')")
        assert Hub.asked == [], "nothing is asked for unless told to"
        downloaded = ask("FeatureEncoder('me/tiny', download=True)")
        assert any("/resolve/" in path for path in Hub.asked)
        Hub.asked.clear()
        offline = ask("FeatureEncoder('me/tiny')", HF_HUB_OFFLINE="1")
        pinned = ask(f"FeatureEncoder('me/tiny', revision={COMMIT!r})")
        assert "at revision other" in ask("FeatureEncoder('me/tiny', revision='other')")
        assert Hub.asked == []
    finally:
        server.shutdown()
        server.server_close()

    assert downloaded == offline == pinned == FeatureEncoder(folder).identity()["weights"]


SMALL = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
TEXT = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 50, "max_position_embeddings": 8,
}  # fmt: skip


def make_tower(folder: Path, kind: str) -> tuple[Path, object]:
    """A random CLIP, SigLIP, DINOv3 or ViT in a folder, and the module that sees images."""
    import transformers as t

    torch.manual_seed(0)
    if kind in ("clip", "siglip"):
        name = {"clip": "CLIP", "siglip": "Siglip"}[kind]
        vision, text = getattr(t, f"{name}VisionConfig")(**SMALL), getattr(t, f"{name}TextConfig")(**TEXT)
        config = getattr(t, f"{name}Config")(vision_config=vision.to_dict(), text_config=text.to_dict())
        model = getattr(t, f"{name}Model")(config).eval()
        tower = model.vision_model
    else:
        classes = {
            "clip-vision": (t.CLIPVisionModel, t.CLIPVisionConfig),
            "siglip-vision": (t.SiglipVisionModel, t.SiglipVisionConfig),
            "dinov3": (t.DINOv3ViTModel, t.DINOv3ViTConfig),
            "dino": (t.ViTModel, t.ViTConfig),
        }[kind]
        more = {"num_register_tokens": 4} if kind == "dinov3" else {}
        model = tower = classes[0](classes[1](**SMALL, **more)).eval()
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder, tower


@pytest.mark.parametrize("kind", ["clip", "clip-vision", "siglip", "siglip-vision", "dinov3", "dino"])
def test_vision_towers_alone_and_in_a_complete_model(tmp_path: Path, kind: str) -> None:
    folder, tower = make_tower(tmp_path, kind)
    batch = {"image": images()[..., :28]}
    with torch.inference_mode():
        wanted = tower(pixel_values=normalized()[..., :28])  # type: ignore[operator]

    tokens = FeatureEncoder(folder, "tokens").encode(batch)["features"]
    pooled = FeatureEncoder(folder, "pooled").encode(batch)["features"]
    mean = FeatureEncoder(folder, "mean").encode(batch)["features"]

    assert torch.allclose(tokens, wanted.last_hidden_state, atol=1e-5)
    assert torch.allclose(pooled, wanted.pooler_output, atol=1e-5)
    assert torch.allclose(mean, wanted.last_hidden_state[:, -4:].mean(1), atol=1e-5)
    assert not any("text" in name for name in FeatureEncoder(folder, "mean").weights())
    if kind.startswith("siglip"):
        with pytest.raises(EncoderError, match="no class token"):
            FeatureEncoder(folder, "cls")


def test_a_pooled_output_without_weights_is_refused_not_random(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder, _ = make_tower(tmp_path, "dino")
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if not name.startswith("pooler.")}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})

    FeatureEncoder(folder, "cls").encode({"image": images()[..., :28]})
    with pytest.raises(EncoderError, match="pooler"):
        FeatureEncoder(folder, "pooled").encode({"image": images()[..., :28]})
