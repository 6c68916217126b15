"""CLIP of Hugging Face learns which caption belongs to which digit, by a loss over all pairs of a batch.

python examples/clip_digits.py                                               # 4 stages in this process
torchrun --nproc-per-node 4 --local-ranks-filter 0 examples/clip_digits.py   # one process per stage
python examples/clip_digits.py --plain                                       # without pipec

Each image is compared with every caption of the mini-batch, so that no microbatch can compute its loss
(Radford et al. 2021, "Learning Transferable Visual Models From Natural Language Supervision"). The towers run
microbatch by microbatch, the similarities once a step: the losses are those of the plain loop.
"""

import argparse

import torch
from digits import load_images
from torch import Tensor
from transformers import CLIPConfig, CLIPModel

import pipec

NUM_TRAIN, BATCH = 1536, 128
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
END = 27


def make_model() -> CLIPModel:
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": END + 1, "max_position_embeddings": 8, "eos_token_id": END, "bos_token_id": 0}
    vision = {"image_size": 8, "patch_size": 2, "num_channels": 1}
    return CLIPModel(CLIPConfig(text_config=tower | text, vision_config=tower | vision, projection_dim=32))


def captions() -> Tensor:
    """The names of the digits as numbers of letters, each with an end and padding: (10, 8)."""
    spelled = [[ord(letter) - ord("a") + 1 for letter in name] for name in NAMES]
    return torch.tensor([letters + [END] + [0] * (7 - len(letters)) for letters in spelled])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--plain", action="store_true", help="train without pipec")
    args = parser.parse_args()

    torch.manual_seed(0)
    images, labels = load_images()
    texts, generator = captions(), torch.Generator().manual_seed(0)

    model = make_model()
    batched = {"input_ids": 0, "pixel_values": 0}  # the model itself would take more texts than images
    trained = model if args.plain else pipec.compile(model, devices=4, microbatches=8, batched=batched)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=2e-3)

    for epoch in range(args.epochs):
        for batch in torch.randperm(NUM_TRAIN, generator=generator).split(BATCH):
            pairs = {"input_ids": texts[labels[batch]], "pixel_values": images[batch], "return_loss": True}
            if args.plain:
                loss = model(**pairs).loss
                loss.backward()
            else:
                loss = trained.step(**pairs)
            optimizer.step()
            optimizer.zero_grad()
        pipec.log(f"epoch {epoch:2}  loss {loss:.6f}")

    if not args.plain:
        trained.gather_into(model, all_ranks=True)
    with torch.no_grad():
        logits = model(input_ids=texts, pixel_values=images[NUM_TRAIN:]).logits_per_image
    accuracy = (logits.argmax(1) == labels[NUM_TRAIN:]).float().mean()
    pipec.log(f"accuracy of the most similar caption {accuracy:.1%}")


if __name__ == "__main__":
    main()
