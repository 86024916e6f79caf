"""A plain loop in one process: what the scripts beside it must equal.

    python one_process.py [NUM_EPOCHS]

Goes on from checkpoint.pt if there is one, also if several ranks have written it (ddp.py).
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from balancer import BalancedDataLoader

CHECKPOINT = Path("checkpoint.pt")


class Stories(Dataset[torch.Tensor]):
    """Token sequences of very unequal length; 0 is padding."""

    def __init__(self) -> None:
        self.lengths = [8 + (i % 3 == 0) * 37 * i % 400 for i in range(63)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([(i % 46 + 1) * pow(3, place, 47) % 47 for place in range(self.lengths[i])])

    def cost(self, i: int) -> int:
        return self.lengths[i]


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def main(num_epochs: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(47, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 47)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    data = Stories()
    labels = {"label_tokens": [length - 1 for length in data.lengths]}
    loader = BalancedDataLoader(data, 8, shuffle=True, collate_fn=padded, cost=data.cost, cost_index=labels)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, map_location=device)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    while loader.epoch < num_epochs:
        for batch in loader:
            now, tokens = loader.current, batch.to(device)
            logits = model(tokens[:, :-1]).transpose(1, 2)
            loss_sum = nn.functional.cross_entropy(logits, tokens[:, 1:], ignore_index=0, reduction="sum")
            loss = loss_sum / now.step_label_tokens
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {now.step} loss {loss.item():.7f}", flush=True)
            if now.step % 5 == 4:
                torch.save({name: part.state_dict() for name, part in parts.items()}, CHECKPOINT)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
