"""Online label smoothing over epochs: its table, its state, and the same on several processes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from cclnet import CCLNet, build_method
from cclnet.methods import Classes
from cclnet.methods.base import sum_over_processes
from cclnet.methods.online_smoothing import OnlineSmoothing

K = 4
FEATURES = torch.zeros(12, 2)


def fresh(alpha: float = 0.5) -> OnlineSmoothing:
    method = build_method("ols", Classes(K, 2), {"alpha": alpha})
    assert isinstance(method, OnlineSmoothing)
    return method


def batches(count: int = 3, classes: int = K) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Labels come from the first ``classes`` only; logits lean towards them, not always far enough."""
    made = []
    for _ in range(count):
        labels = torch.randint(classes, (12,))
        made.append((torch.randn(12, K, dtype=torch.float64) + 1.5 * F.one_hot(labels, K), labels))
    return made


def table_by_loops(seen: list[tuple[torch.Tensor, torch.Tensor]], before: list[list[float]]) -> list[list[float]]:
    table = []
    for k in range(K):
        right = []
        for logits, labels in seen:
            for z, y in zip(logits.tolist(), labels.tolist(), strict=True):
                if y == k and max(range(K), key=lambda j: z[j]) == k:
                    total = sum(math.exp(v) for v in z)
                    right.append([math.exp(v) / total for v in z])
        table.append([sum(row[j] for row in right) / len(right) for j in range(K)] if right else before[k])
    return table


def test_each_epoch_has_the_right_predictions_of_the_last() -> None:
    method = fresh(alpha=0.3)
    table = [[1 / K] * K for _ in range(K)]
    for _ in range(3):
        torch.testing.assert_close(method.soft_labels(), torch.tensor(table, dtype=torch.float64))
        seen = batches()
        for logits, labels in seen:
            target = torch.tensor(table, dtype=torch.float64)[labels]
            expected = 0.3 * F.cross_entropy(logits, labels) + 0.7 * F.cross_entropy(logits, target)
            torch.testing.assert_close(method(FEATURES, logits, labels).total, expected)
        logged = method.end_epoch()
        table = table_by_loops(seen, table)
        assert logged["softness"] == pytest.approx(sum(table[k][k] for k in range(K)) / K)
        assert logged["classes_never_right"] == 0


def test_a_class_that_was_never_right_keeps_its_row() -> None:
    method = fresh()
    first = batches(classes=3)
    for logits, labels in first:
        method(FEATURES, logits, labels)
    assert method.end_epoch()["classes_never_right"] == 1
    after_first = method.soft_labels()
    torch.testing.assert_close(after_first[3], torch.full((K,), 1 / K, dtype=torch.float64))  # still smoothed
    labels = torch.full((12,), 3)
    method(FEATURES, 5.0 * F.one_hot(labels, K).double(), labels)  # now only the fourth class is seen
    assert method.end_epoch()["classes_never_right"] == 3
    torch.testing.assert_close(method.soft_labels()[:3], after_first[:3])  # their last rows
    assert float(method.soft_labels()[3, 3]) > 0.9
    before = method.soft_labels()
    assert method.end_epoch()["classes_never_right"] == K  # an epoch without images changes nothing
    torch.testing.assert_close(method.soft_labels(), before)


def test_mixed_images_count_for_the_class_they_were_predicted_as() -> None:
    method = fresh()
    logits = torch.tensor([[2.0, 1.0, 0.0, 0.0], [1.0, 3.0, 0.0, 0.0], [0.0, 0.0, 4.0, 0.0]], dtype=torch.float64)
    shares = torch.tensor([[0.25, 0.75, 0, 0], [0.4, 0.6, 0, 0], [0.5, 0.5, 0, 0]], dtype=torch.float64)
    method(torch.zeros(3, 2), logits, shares)
    p = torch.softmax(logits, dim=1)
    expected = torch.zeros(K, K, dtype=torch.float64)
    expected[0], expected[1] = 0.25 * p[0], 0.6 * p[1]  # the third image was predicted as neither of its two
    torch.testing.assert_close(method.seen.sum(dim=0), expected, rtol=1e-4, atol=0)


def test_only_training_counts_and_sample_weights_do_not() -> None:
    method, weighed = fresh(), fresh()
    for logits, labels in batches():
        method(FEATURES, logits, labels)
        weighed(FEATURES, logits, labels, torch.rand(12, dtype=torch.float64))
        method.eval()(FEATURES, -logits, labels)
        method.train()
    torch.testing.assert_close(method.seen, weighed.seen)


def test_a_run_resumed_in_mid_epoch_is_the_same_run(tmp_path: Path) -> None:
    straight, first_half = fresh(), fresh()
    seen = batches(6)
    for logits, labels in seen[:3]:
        straight(FEATURES, logits, labels)
        first_half(FEATURES, logits, labels)
    straight.end_epoch(), first_half.end_epoch()
    for logits, labels in seen[3:5]:
        straight(FEATURES, logits, labels)
        first_half(FEATURES, logits, labels)
    torch.save(first_half.state_dict(), tmp_path / "state.pt")
    resumed = fresh()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for method in (straight, resumed):
        method(FEATURES, *seen[5])
        method.end_epoch()
    assert torch.equal(straight.soft_labels(), resumed.soft_labels())


def test_the_table_handed_out_is_not_changed_afterwards() -> None:
    method = fresh()
    handed_out = method.soft_labels()
    method(FEATURES, *batches(1)[0])
    method.end_epoch()
    assert torch.equal(handed_out, torch.full((K, K), 1 / K, dtype=torch.float64))


def small_network() -> CCLNet:
    torch.manual_seed(3)
    return CCLNet(torch.nn.Linear(5, 2), K, "ols", feature_width=2).double()


def images_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(8, 5, dtype=torch.float64, generator=generator)
    return images, torch.randint(K, (8,), generator=generator)


def one_of_two_processes(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    network = small_network()
    wrapped = DistributedDataParallel(network)  # with its default, which overwrites buffers at every step
    for step in range(4):
        images, labels = images_of(step)
        mine = slice(4 * rank, 4 * rank + 4)
        wrapped(images[mine], labels[mine]).total.backward()
    torch.save({"seen": sum_over_processes(network.method.seen.clone())}, f"{folder}/seen{rank}.pt")
    network.method.end_epoch()
    torch.save({"table": network.soft_labels()}, f"{folder}/table{rank}.pt")
    dist.barrier()  # else torch may end one process while the other still closes its connections
    dist.destroy_process_group()


def test_two_processes_have_the_table_of_one(tmp_path: Path) -> None:
    mp.spawn(one_of_two_processes, (str(tmp_path),), nprocs=2)
    network = small_network()
    for step in range(4):
        network(*images_of(step))
    alone = network.method.seen.clone()
    network.method.end_epoch()
    assert float(alone.sum()) >= 4
    for rank in range(2):
        seen = torch.load(tmp_path / f"seen{rank}.pt", weights_only=True)["seen"]
        table = torch.load(tmp_path / f"table{rank}.pt", weights_only=True)["table"]
        assert torch.equal(seen, alone)  # the same bits
        torch.testing.assert_close(table, network.soft_labels())
