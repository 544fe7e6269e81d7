"""The click models: against TorchRec's with the same weights, and by hand."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recmill import registry
from recmill.config import load_config
from recmill.errors import ConfigError
from recmill.nn.click_network import ClickNetwork
from recmill.nn.interactions import (
    CrossInteraction,
    CrossLayer,
    DotInteraction,
    Interaction,
    ProjectionInteraction,
)
from recmill.nn.mlp import linear, mlp
from recmill.schema import ClicksDescription, SparseFeature

from ..mixed_precision import MixedPrecision

CPU = torch.device("cpu")
TABLE_ROWS = [5, 9, 30]
ABOUT = ClicksDescription(
    name="tiny",
    made_by="test",
    recipe={},
    files={},
    dense=["I1", "I2", "I3"],
    sparse=[SparseFeature(name=f"C{i}", rows=rows) for i, rows in enumerate(TABLE_ROWS)],
    splits={},
)
SIZES: dict[str, Any] = {"embedding_dim": 8, "bottom_mlp": [6, 8], "top_mlp": [12, 5]}
MODELS: dict[str, dict[str, Any]] = {
    "dlrm": SIZES | {"pad_to_multiple_of": 1},
    "dcnv2": SIZES | {"num_cross_layers": 2, "cross_rank": 3},
    "projection": SIZES | {"branch1_mlp": [20, 16], "branch2_mlp": [24]},
}


def build(name: str, **changes: Any) -> ClickNetwork:
    module = registry.load(registry.MODELS, name, "model")
    torch.manual_seed(1)
    return module.build(module.Config(**MODELS[name] | changes), ABOUT, CPU)


def inputs(num_rows: int = 7) -> tuple[Tensor, KeyedJaggedTensor]:
    """0 to 3 ids per row and feature."""
    torch.manual_seed(2)
    lengths = torch.randint(0, 4, (len(TABLE_ROWS), num_rows))
    ids = [torch.randint(0, rows, (int(n.sum()),)) for rows, n in zip(TABLE_ROWS, lengths, strict=True)]
    keys = [feature.name for feature in ABOUT.sparse]
    return torch.randn(num_rows, 3), KeyedJaggedTensor(keys=keys, values=torch.cat(ids), lengths=lengths.flatten())


def torchrec_model(name: str) -> nn.Module:
    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"table_{f.name}", embedding_dim=8, num_embeddings=f.rows, feature_names=[f.name])
            for f in ABOUT.sparse
        ]
    )
    frame: dict[str, Any] = {
        "embedding_bag_collection": tables,
        "dense_in_features": 3,
        "dense_arch_layer_sizes": [6, 8],
        "over_arch_layer_sizes": [12, 5, 1],
    }
    if name == "dcnv2":
        return DLRM_DCN(**frame, dcn_num_layers=2, dcn_low_rank_dim=3)
    if name == "projection":
        return DLRM_Projection(**frame, interaction_branch1_layer_sizes=[20, 16], interaction_branch2_layer_sizes=[24])
    return DLRM(**frame)


OUR_NAMES = [  # what TorchRec calls a weight -> what we call it; our MLPs count their ReLUs too
    (r"sparse_arch\.embedding_bag_collection\.(.*)", r"tables.\1"),
    (r"dense_arch\.model\._mlp\.(\d+)\._linear\.(.*)", r"bottom.{}.\2"),
    (r"over_arch\.model\.0\._mlp\.(\d+)\._linear\.(.*)", r"top.{}.\2"),
    (r"over_arch\.model\.1\.(.*)", r"logit.\1"),
    (r"inter_arch\.interaction_(branch\d)\.model\._mlp\.(\d+)\._linear\.(.*)", r"interaction.\1.{}.\3"),
    (r"inter_arch\.crossnet\.V_kernels\.(\d+)", r"interaction.layers.\1.down.weight"),
    (r"inter_arch\.crossnet\.W_kernels\.(\d+)", r"interaction.layers.\1.up.weight"),
    (r"inter_arch\.crossnet\.bias\.(\d+)", r"interaction.layers.\1.up.bias"),
]


def our_name(theirs: str) -> str:
    for pattern, ours in OUR_NAMES:
        if found := re.fullmatch(pattern, theirs):
            layer = next((int(group) for group in found.groups() if group.isdigit()), 0)
            return found.expand(ours).format(2 * layer)
    raise AssertionError(theirs)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_those_of_torchrec_with_the_same_weights(name: str) -> None:
    ours, theirs = build(name), torchrec_model(name)
    mapped = {key: our_name(key) for key in theirs.state_dict()}
    assert sorted(mapped.values()) == sorted(ours.state_dict())
    theirs.load_state_dict({key: ours.state_dict()[value] for key, value in mapped.items()})
    logits, expected = ours(*inputs()), theirs(*inputs())[:, 0]
    torch.testing.assert_close(logits, expected)
    logits.square().sum().backward()
    expected.square().sum().backward()
    gradients = {key: parameter.grad for key, parameter in ours.named_parameters()}
    for key, parameter in theirs.named_parameters():
        torch.testing.assert_close(gradients[our_name(key)], parameter.grad)


@pytest.mark.parametrize("name", MODELS)
def test_the_order_of_the_pooled_columns_does_not_matter(name: str) -> None:
    model = build(name)
    expected = model(*inputs())
    pooled = model.tables(inputs()[1])
    assert pooled.keys() == ["C0", "C1", "C2"]
    order = ["C2", "C0", "C1"]
    values = torch.cat([pooled[key] for key in order], dim=1)

    class Reordered(nn.Module):
        def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
            return KeyedTensor(keys=order, length_per_key=[8, 8, 8], values=values)

    model.tables = Reordered()
    assert torch.equal(model(*inputs()), expected)


A, B, C, D = [1.0, 2.0], [3.0, -1.0], [0.5, 4.0], [-2.0, 1.0]


@pytest.mark.parametrize(
    ("itself", "expected"),
    [
        (False, [1.0, 8.5, 0.0, -2.5, -7.0, 3.0]),  # a.b a.c a.d b.c b.d c.d
        (True, [5.0, 1.0, 8.5, 0.0, 10.0, -2.5, -7.0, 16.25, 3.0, 5.0]),  # a.a a.b a.c a.d b.b b.c b.d c.c c.d d.d
    ],
)
def test_dot_products_follow_the_dense_vector_row_by_row(itself: bool, expected: list[float]) -> None:
    layer = DotInteraction(4, 2, itself)
    assert layer(torch.tensor([A]), torch.tensor([B + C + D])).tolist() == [A + expected]
    assert layer.out_features == 2 + len(expected)


def test_one_cross_layer_by_hand() -> None:
    """V = [1 2], W = [3 -1]', b = [0.5 0.25]: V x = 6, W V x + b = [18.5 -5.75], times x0, plus x."""
    layer = CrossLayer(2, 1)
    with torch.no_grad():
        layer.down.weight.copy_(torch.tensor([[1.0, 2.0]]))
        layer.up.weight.copy_(torch.tensor([[3.0], [-1.0]]))
        layer.up.bias.copy_(torch.tensor([0.5, 0.25]))
    first, x = torch.tensor([[2.0, -4.0]]), torch.tensor([[4.0, 1.0]])
    assert layer(first, x).tolist() == [[2.0 * 18.5 + 4.0, -4.0 * -5.75 + 1.0]]


INTERACTIONS: dict[str, Any] = {
    "dot": lambda: DotInteraction(4, 8),
    "dot with itself, padded": lambda: DotInteraction(4, 8, itself=True, pad_to_multiple_of=16),
    "cross": lambda: CrossInteraction(4, 8, num_layers=2, rank=3),
    "projection": lambda: ProjectionInteraction(4, 8, [16], [24]),
}


@pytest.fixture(params=INTERACTIONS)
def interaction(request: pytest.FixtureRequest) -> Interaction:
    torch.manual_seed(3)
    return INTERACTIONS[request.param]()


def vectors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    return torch.randn(5, 8, dtype=dtype, requires_grad=True), torch.randn(5, 24, dtype=dtype, requires_grad=True)


def test_gradients_equal_finite_differences(interaction: Interaction) -> None:
    assert torch.autograd.gradcheck(interaction.double(), vectors(torch.float64))


def test_compiled_in_one_piece_it_gives_the_same(interaction: Interaction) -> None:
    compiled = torch.compile(interaction, fullgraph=True, dynamic=False, backend="aot_eager")
    dense, others = vectors()
    out, again = interaction(dense, others), compiled(dense, others)
    assert torch.equal(out, again)
    assert out.shape == (5, interaction.out_features + interaction.padding)
    expected = torch.autograd.grad(out.square().sum(), [dense, others], allow_unused=True)
    found = torch.autograd.grad(again.square().sum(), [dense, others], allow_unused=True)
    torch.testing.assert_close([g for g in found if g is not None], [g for g in expected if g is not None])


def check_autocast(name: str, dtype: torch.dtype) -> None:
    model = build(name)
    exact = model(*inputs())
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        rounded = model(*inputs())
    assert rounded.dtype == dtype
    tolerance = 0.03 if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(rounded.float(), exact, rtol=tolerance, atol=tolerance)
    rounded.float().square().sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("name", MODELS)
def test_under_autocast_the_result_is_that_of_float32_but_for_rounding(name: str, mixed: MixedPrecision) -> None:
    """bfloat16 keeps 8 bits: a few parts in a hundred after several layers."""
    mixed.run("bfloat16", check_autocast, name, mixed.dtype("bfloat16"))


@pytest.mark.parametrize("init", ["torch", "dlrm"])
def test_padding_changes_nothing_before_or_after_training(init: str) -> None:
    """3 dense features become 8 inputs, 8 + 6 interactions become 16."""
    plain, padded = build("dlrm", init=init), build("dlrm", init=init, pad_to_multiple_of=8)
    assert (plain.bottom[0].in_features, plain.top[0].in_features) == (3, 14)
    assert (padded.bottom[0].in_features, padded.top[0].in_features) == (8, 16)
    for model in (plain, padded):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(*inputs()).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(padded(*inputs()), plain(*inputs()))
    assert not padded.state_dict()["top.0.weight"][:, 14:].any()


def test_dlrms_own_start_is_normal_by_fan_in_and_fan_out() -> None:
    torch.manual_seed(0)
    layer = linear(300, 500, "dlrm")
    assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / 800), rel=0.02)
    assert layer.bias.std().item() == pytest.approx(math.sqrt(1 / 500), rel=0.15)
    assert layer.weight.abs().max() > 3.5 * layer.weight.std()  # torch's own is uniform: 1.7 at most


def test_an_mlp_has_a_relu_after_every_layer() -> None:
    layers = mlp(3, [5, 2])
    assert [type(layer) for layer in layers] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU]
    assert [layer.weight.shape for layer in layers if isinstance(layer, nn.Linear)] == [(5, 3), (2, 5)]


def test_all_contradictions_of_a_projection_are_told_at_once() -> None:
    model = {"name": "projection", "embedding_dim": 8, "bottom_mlp": [4], "branch1_mlp": [9], "branch2_mlp": [16, 20]}
    with pytest.raises(ConfigError) as caught:
        load_config({"data": {"path": "d"}, "model": model})
    for text in (
        "model.bottom_mlp ends with 4, but model.embedding_dim is 8",
        "model.branch1_mlp ends with 9, which is not a multiple of model.embedding_dim = 8",
        "model.branch2_mlp ends with 20, which is not a multiple of model.embedding_dim = 8",
    ):
        assert text in str(caught.value)
