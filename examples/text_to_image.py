"""Text-to-image training on cached latents and text.

    python examples/text_to_image.py PIPELINE IMAGES OUT [EPOCHS [LR]]

PIPELINE is a folder of diffusers with `vae`, `tokenizer`, `text_encoder`, `tokenizer_2`, `text_encoder_2`,
`unet` and `scheduler`. IMAGES has pictures, each with its caption in a text file of the same name. Killed at
any moment, the same command continues.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import stoker
from stoker.transforms import DrawLatent, DropCondition


def make_caches(pipeline: Path, images: Path, out: Path, size: int) -> dict[str, stoker.Cache]:
    """Encode what is missing: pictures once, a text again when its caption changes."""
    files = sorted(images.glob("*.txt"))
    captions = [{"caption": file.read_text()} for file in files] + [{"caption": ""}]
    version = hashlib.sha256(str(captions).encode()).hexdigest()
    text = stoker.TorchSource(
        captions, text={"caption": "bytes"}, keys=[*(file.stem for file in files), ""], version=version
    )
    ids = stoker.Tokenize(
        text,
        pipeline / "tokenizer",
        out="ids_one",
        attention_mask="mask_one",
        max_length=LENGTH,
        keep_text=True,
    )
    ids = stoker.Tokenize(
        ids, pipeline / "tokenizer_2", out="ids_two", attention_mask="mask_two", max_length=LENGTH
    )
    pictures = stoker.ImageSource(images, size=(size, size))
    encoders = {
        name: stoker.TextEncoder(
            pipeline / folder, field=f"ids_{name}", attention_mask=f"mask_{name}", attend="all"
        )
        for name, folder in TEXTS.items()
    }
    hidden = {name: ["hidden"] for name in encoders}
    return {
        "latents": stoker.precompute(
            pictures, stoker.VAEEncoder(pipeline), out, name="latents", fields=["mean", "std"]
        ),
        **stoker.precompute(ids, encoders, out, name="text", fields=hidden),
    }


TEXTS = {"one": "text_encoder", "two": "text_encoder_2"}
LENGTH = 8  # tokens of a text; 77 for CLIP


def make_loader(caches: dict[str, stoker.Cache], scale: float) -> stoker.Loader:
    """Return batches of drawn latents and text, a tenth of it the empty text."""
    null = {name: caches[name].get("")["hidden"] for name in TEXTS}
    draw = DrawLatent(mean="latents.mean", std="latents.std", scale=scale)
    drop = DropCondition([*TEXTS], p=0.1, null=null)
    return stoker.Loader(stoker.zip(**caches), 4, shuffle=True, seed=0, transforms=[draw, drop])


def train(loader: Any, pipeline: Path, state: Path, *, epochs: int = 2, lr: float = 1e-3) -> list[float]:
    """Train the UNet to predict noise; return the loss of each step. Continues from `state`."""
    from diffusers import DDPMScheduler, UNet2DConditionModel

    unet, scheduler = (
        UNet2DConditionModel.from_pretrained(pipeline / "unet"),
        DDPMScheduler.from_pretrained(pipeline / "scheduler"),
    )
    optimizer, losses = torch.optim.AdamW(unet.parameters(), lr=lr), list[float]()
    if state.exists():
        saved = torch.load(state, weights_only=True)
        unet.load_state_dict(saved["unet"]), optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        losses = saved["losses"]
    while loader.epoch < epochs:
        for batch in loader:
            torch.manual_seed(len(losses))  # the same noise after a resume
            latent, text = batch["latent"], torch.cat([batch[name] for name in TEXTS], dim=1)
            noise, step = torch.randn(latent.shape), torch.randint(1000, (len(latent),))
            found = unet(scheduler.add_noise(latent, noise, step), step, text).sample
            loss = F.mse_loss(found, noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            saved = {"unet": unet.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
            torch.save({**saved, "loader": loader.state_dict()}, state.with_suffix(".tmp"))
            state.with_suffix(".tmp").replace(state)
    return losses


if __name__ == "__main__":
    pipeline, images, out = map(Path, sys.argv[1:4])
    out.mkdir(parents=True, exist_ok=True)
    scale = stoker.VAEEncoder(pipeline).scaling_factor
    loader = make_loader(make_caches(pipeline, images, out / "caches", size=32), scale)
    epochs = int(sys.argv[4]) if len(sys.argv) > 4 else 2
    lr = float(sys.argv[5]) if len(sys.argv) > 5 else 1e-3
    print("losses", *train(loader, pipeline, out / "state.pt", epochs=epochs, lr=lr))
