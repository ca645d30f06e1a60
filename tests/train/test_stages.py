"""Stages, inverse losses and drawn strides on the real Loader, over a small real cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.encoders.grid import decoder_of, encode_of
from stoker.encoders.wrappers import keep_fields
from stoker.errors import ConfigError, RecordError, StaleStateError
from stoker.train.config import FieldSpace, StageName, TrainConfig, TrainReport, TrainStage
from stoker.train.objective import StageLoss
from stoker.train.operator import DecoderShape, FieldDecoder, LatentOperator, OperatorShape
from stoker.train.run import train
from stoker.train.state import Checkpoint, load_checkpoint
from tests.conftest import write_burgers

STAGES = (
    TrainStage(name="operator", epochs=2),
    TrainStage(name="decoder", epochs=3, lr=1e-2),
    TrainStage(name="consistency", epochs=1),
)
ENCODER = stoker.GridEncoder(channels=1, grid=(1, 32), patch=(1, 4), tokens=8, dim=2, seed=0)
"""Half as many numbers as values: what it loses is there to be learned."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> stoker.Cache:
    folder = tmp_path_factory.mktemp("data")
    write_burgers(folder / "1D_Burgers_Sols_Nu0.01.hdf5", samples=4)
    source = stoker.HDF5Source(str(folder / "*.hdf5"), preset="pdebench")
    return stoker.precompute(source, keep_fields(ENCODER, "data"), folder / "cache", name="b", workers=0)


@pytest.fixture(scope="module")
def space() -> FieldSpace:
    identity, weights = ENCODER.identity(), ENCODER.weights()
    return FieldSpace(field="data", decode=decoder_of(identity, weights), encode=encode_of(identity, weights))


@pytest.fixture(scope="module")
def whole(
    cache: stoker.Cache, space: FieldSpace, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainReport, Checkpoint]:
    """A run through all stages."""
    folder = tmp_path_factory.mktemp("whole")
    return run(cache, space, folder), last(folder)


def run(
    cache: stoker.Cache,
    space: FieldSpace | None,
    folder: Path,
    *,
    stages: tuple[TrainStage, ...] = STAGES,
    only: StageName | None = None,
    sink: Any = None,
    stride: Any = 1,
    **changes: Any,
) -> TrainReport:
    def loader(horizon: int) -> stoker.Loader:
        windows = stoker.Windows(stride=stride, horizon=horizon)
        return stoker.Loader(cache, batch_size=8, windows=windows, shuffle=True)

    at_one = loader(1)
    least = (1, 1) if isinstance(stride, tuple) else stride
    val = stoker.Loader(cache, batch_size=8, windows=stoker.Windows(stride=least), shuffle=False)
    small: dict[str, Any] = {"width": 8, "depth": 1, "heads": 2, "log_every": 1, "checkpoint_every": 1}
    return train(
        at_one,
        val,
        TrainConfig(stages=stages, **{**small, **changes}),
        folder,
        on_event=sink,
        space=space,
        loader_of=lambda stage: loader(3) if stage.name == "consistency" else at_one,
        only=only,
    )


def last(folder: Path) -> Checkpoint:
    return load_checkpoint(max((folder / "checkpoints").glob("last-*")))


def same_weights(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Stop(Exception):
    pass


def test_stages_follow_each_other_and_each_reports_what_it_came_to(
    whole: tuple[TrainReport, Checkpoint],
) -> None:
    report, checkpoint = whole

    operator, decoder, consistency = report.stages
    assert [s["name"] for s in report.stages] == ["operator", "decoder", "consistency"]
    assert [s["epochs"] for s in report.stages] == [2, 3, 1]
    assert report.steps == sum(s["steps"] for s in report.stages)  # type: ignore[misc]
    assert report.finished
    assert decoder["val_nrmse"] == operator["val_nrmse"]  # frozen
    assert decoder["physical_nrmse"] < operator["physical_nrmse"]  # type: ignore[operator]
    assert consistency["val_nrmse"] != operator["val_nrmse"]
    assert checkpoint.state["stage"] == "consistency"


@pytest.mark.parametrize("step", [8, 12, 21])
def test_a_run_killed_in_any_stage_ends_with_the_same_bits(
    cache: stoker.Cache, space: FieldSpace, whole: tuple[TrainReport, Checkpoint], tmp_path: Path, step: int
) -> None:
    def kill(kind: str, facts: Mapping[str, Any]) -> None:
        if kind == "checkpoint" and facts["step"] == step:
            raise Stop

    with pytest.raises(Stop):
        run(cache, space, tmp_path, sink=kill)
    report = run(cache, space, tmp_path, resume=True)

    expected, checkpoint = whole
    assert report.stages == expected.stages
    assert same_weights(last(tmp_path).model, checkpoint.model)
    assert same_weights(last(tmp_path).optimizer, checkpoint.optimizer)


def test_stages_done_one_by_one_are_the_run_in_one_go(
    cache: stoker.Cache, space: FieldSpace, whole: tuple[TrainReport, Checkpoint], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--stage operator"):
        run(cache, space, tmp_path, only="decoder")
    assert not run(cache, space, tmp_path, only="operator").finished
    with pytest.raises(ConfigError, match="--stage decoder"):
        run(cache, space, tmp_path, only="consistency", resume=True)
    with pytest.raises(ConfigError, match="--stage decoder"):
        run(cache, space, tmp_path, only="operator", resume=True)
    run(cache, space, tmp_path, only="decoder", resume=True)
    report = run(cache, space, tmp_path, only="consistency", resume=True)

    assert report.finished
    assert same_weights(last(tmp_path).model, whole[1].model)
    with pytest.raises(StaleStateError, match="consistency"):
        run(cache, space, tmp_path, stages=STAGES[:2], resume=True)


def test_a_stage_ends_early_by_its_own_patience(
    cache: stoker.Cache, space: FieldSpace, tmp_path: Path
) -> None:
    stages = (TrainStage(epochs=2), TrainStage(name="decoder", epochs=9, lr=1e-30, patience=1), STAGES[2])

    report = run(cache, space, tmp_path, stages=stages)

    assert [s["epochs"] for s in report.stages] == [2, 2, 1]
    assert all(s["rollout_nrmse"] is not None for s in report.stages)


def test_inverse_losses_train_the_decoder_and_the_operator(
    cache: stoker.Cache, space: FieldSpace, tmp_path: Path
) -> None:
    plain = TrainStage(epochs=3, lr=1e-2)
    found = {
        name: run(cache, space, tmp_path / name, stages=(stage,))
        for name, stage in {
            "plain": replace(plain, lambda_inv_enc=1e-30),
            "encoding": replace(plain, lambda_inv_enc=1.0),
            "both": replace(plain, lambda_inv_enc=1.0, lambda_inv_dec=1.0),
        }.items()
    }

    plain_error, encoding, both = (report.physical_nrmse for report in found.values())
    assert encoding is not None
    assert plain_error is not None
    assert encoding < plain_error
    assert found["encoding"].val_nrmse == found["plain"].val_nrmse  # it does not reach the operator
    assert found["both"].val_nrmse != found["plain"].val_nrmse
    assert both is not None


def test_what_a_decoder_needs_is_asked_for(cache: stoker.Cache, space: FieldSpace, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="space="):
        run(cache, None, tmp_path)
    with pytest.raises(ConfigError, match="lambda_inv_dec"):
        run(cache, replace(space, encode=None), tmp_path, stages=(TrainStage(lambda_inv_dec=1.0),))
    with pytest.raises(RecordError, match=r"precompute\.keep=speed"):
        run(cache, replace(space, field="speed"), tmp_path)


def test_operators_learn_from_drawn_strides_and_are_judged_at_the_smallest(
    cache: stoker.Cache, space: FieldSpace, tmp_path: Path
) -> None:
    report = run(cache, space, tmp_path, stride=(1, 2), most_stride=2)

    assert last(tmp_path).state["widths"]["stride"] == 1
    assert report.val_nrmse is not None
    assert report.rollout_nrmse is not None


def test_encoding_with_gradients_is_the_encoder_itself() -> None:
    encoder = stoker.GridEncoder(channels=2, grid=(6, 10), patch=(1, 1), tokens=6, dim=5, seed=1)
    fields = torch.randn(3, 6, 10, 2, requires_grad=True)
    encode = encode_of(encoder.identity(), encoder.weights())

    assert encode is not None
    states = encode(fields)

    assert torch.allclose(
        states, encoder.encode({"data": fields.detach()[:, None]})["latent"][:, 0], atol=1e-5
    )
    states.sum().backward()
    assert fields.grad is not None


@pytest.mark.parametrize("field", [(4, 6, 2), (5, 7, 1), (1, 16, 1), (3, 4, 5, 2)])
def test_a_decoder_gives_fields_of_any_shape_and_begins_as_the_exact_one(field: tuple[int, ...]) -> None:
    exact = torch.randn(field)
    shape = DecoderShape(tokens=6, dim=3, field=field, width=8)
    decoder = FieldDecoder(shape, lambda states: exact.expand(len(states), *field))

    decoded = decoder(torch.randn(2, 5, 6, 3))

    assert decoded.shape == (2, 5, *field)
    assert torch.equal(decoded[1, 3], exact)


class Doubling(LatentOperator):
    """Each step multiplies by two to the power of the stride, so that all its predictions agree."""

    def forward(self, z0: torch.Tensor, cond: torch.Tensor) -> torch.Tensor:
        return z0 * 2 ** cond[:, :1, None]


def test_consistency_is_no_loss_where_predictions_agree_and_one_where_they_do_not() -> None:
    operator = Doubling(OperatorShape(tokens=1, dim=1, cond=1, width=4, depth=1, heads=1))
    stage = TrainStage(name="consistency")
    consistent = StageLoss(operator, stage, columns={"stride": 0}, most_stride=2)
    z0, stride = torch.ones(2, 1, 1), torch.tensor([[1.0], [1.0]])
    truth = torch.stack([2 * z0, 4 * z0, 8 * z0], dim=1)

    assert consistent(z0, truth, stride).tolist() == [0.0, 0.0]
    wrong = truth.clone()
    wrong[1, 0] = 3.0  # another z1: rolled out from there, the end is another one
    plain = StageLoss(operator, replace(stage, lambda_consistency=0.0))
    assert (consistent(z0, wrong, stride) - plain(z0, wrong, stride)).tolist() == [0.0, (12.0 - 8.0) ** 2]


def test_a_mask_leaves_states_beyond_the_horizon_out_of_the_loss() -> None:
    operator = LatentOperator(OperatorShape(tokens=1, dim=1, cond=0, width=4, depth=1, heads=1))
    z0, states = torch.zeros(1, 1, 1), torch.tensor([[[[2.0]], [[100.0]]]])

    loss = StageLoss(operator)(z0, states, torch.zeros(1, 0), torch.tensor([[1.0, 0.0]]))

    assert loss.tolist() == [4.0]


def test_time_moves_on_in_a_roll_out() -> None:
    class Clock(LatentOperator):
        def forward(self, z0: torch.Tensor, cond: torch.Tensor) -> torch.Tensor:
            return z0 * 0 + cond[:, 1, None, None]

    operator = Clock(OperatorShape(tokens=1, dim=1, cond=2, width=4, depth=1, heads=1))
    operator.clock = (1, 0)

    found = operator.unrolled(torch.zeros(1, 1, 1), torch.tensor([[0.5, 3.0]]), 3)

    assert [float(state) for state in found] == [3.0, 3.5, 4.0]
