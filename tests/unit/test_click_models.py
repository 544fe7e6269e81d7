"""The click models against TorchRec's with the same weights."""

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
from recmill.nn.click_network import ClickNetwork, averaged_over_ids
from recmill.schema import ClicksDescription, SparseFeature

from ..mixed_precision import MixedPrecision

CPU = torch.device("cpu")
TABLE_ROWS = [5, 9, 30]
DESCRIPTION = ClicksDescription(
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
    return module.build(module.Config(**MODELS[name] | changes), DESCRIPTION, CPU)


def inputs(num_rows: int = 7) -> tuple[Tensor, KeyedJaggedTensor]:
    """0 to 3 ids per row and feature."""
    torch.manual_seed(2)
    lengths = torch.randint(0, 4, (len(TABLE_ROWS), num_rows))
    ids = [torch.randint(0, rows, (int(n.sum()),)) for rows, n in zip(TABLE_ROWS, lengths, strict=True)]
    keys = [feature.name for feature in DESCRIPTION.sparse]
    return torch.randn(num_rows, 3), KeyedJaggedTensor(keys=keys, values=torch.cat(ids), lengths=lengths.flatten())


def torchrec_model(name: str) -> nn.Module:
    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"table_{f.name}", embedding_dim=8, num_embeddings=f.rows, feature_names=[f.name])
            for f in DESCRIPTION.sparse
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


@pytest.mark.parametrize("structure", ["stacked", "parallel"])
def test_full_rank_crosses_and_a_parallel_mlp_are_those_of_the_paper(structure: str) -> None:
    """Written down once more: x0 * (W x + b) + x twice; the MLP over it, or beside it over x0."""
    model = build("dcnv2", cross_rank=0, structure=structure)
    dense_BF, sparse = inputs()
    bags = model.tables(sparse).values()
    state = {key: value.detach() for key, value in model.state_dict().items()}

    def layers(name: str, x: Tensor, numbers: list[int]) -> Tensor:
        for number in numbers:
            x = torch.relu(x @ state[f"{name}.{number}.weight"].T + state[f"{name}.{number}.bias"])
        return x

    first = x = torch.cat([layers("bottom", dense_BF, [0, 2]), bags], dim=1)
    for number in (0, 1):
        weight, bias = (state[f"interaction.layers.{number}.up.{kind}"] for kind in ("weight", "bias"))
        assert weight.shape == (32, 32)
        x = first * (x @ weight.T + bias) + x
    last = layers("top", x, [0, 2]) if structure == "stacked" else torch.cat([x, layers("top", first, [0, 2])], dim=1)
    expected = last @ state["logit.weight"][0] + state["logit.bias"]
    torch.testing.assert_close(model(dense_BF, sparse).detach(), expected.detach())


def test_a_shared_table_gets_the_gradients_of_all_its_features() -> None:
    """Against two tables with the same rows: the shared one has the sum of their gradients."""
    apart, shared = build("dcnv2"), build("dcnv2", share_tables={"C0": "C2"})
    assert {key for key in shared.state_dict() if key.startswith("tables.")} == {
        f"tables.embedding_bags.table_{name}.weight" for name in ("C1", "C2")
    }
    state = shared.state_dict()
    rows = state["tables.embedding_bags.table_C2.weight"]
    apart.load_state_dict(state | {"tables.embedding_bags.table_C0.weight": rows[:5]})
    logits = shared(*inputs())
    logits.square().sum().backward()
    # The cross layers see C1, C2, C0 instead of C0, C1, C2.
    apart._features = ["C1", "C2", "C0"]
    expected = apart(*inputs())
    expected.square().sum().backward()
    assert torch.equal(logits, expected)
    bags = apart.tables.embedding_bags
    total = bags["table_C2"].weight.grad.clone()
    total[:5] += bags["table_C0"].weight.grad
    torch.testing.assert_close(shared.tables.embedding_bags["table_C2"].weight.grad, total)


@pytest.mark.parametrize(
    ("keys", "fact"),
    [
        ({"share_tables": {"C7": "C1"}}, "model.share_tables: the dataset has no feature 'C7'. It has C0, C1, C2."),
        ({"share_tables": {"C1": "table_C0"}}, "model.share_tables: the dataset has no feature 'table_C0'."),
        ({"share_tables": {"C1": "C0", "C2": "C1"}}, "'C2' cannot use the table of 'C1', which uses that of 'C0'."),
        ({"padding_ids": {"C7": 0}}, "model.padding_ids: the dataset has no feature 'C7'."),
        ({"padding_ids": {"C0": 5}}, "the padding id of 'C0' is 5, but its ids are 0 to 4. Change it."),
        (
            {"padding_ids": {"C1": 0}, "share_tables": {"C1": "C0"}},
            "the padding id of 'C1' is 0, but 'C0', whose table it uses, has none. Set model.padding_ids.C0.",
        ),
        ({"pooling": {"C7": "mean"}}, "model.pooling: the dataset has no feature 'C7'."),
        ({"embedding_dims": {"C7": 8}}, "model.embedding_dims: the dataset has no feature 'C7'."),
        (
            {"embedding_dims": {"C1": 16}, "share_tables": {"C1": "C0"}},
            "model.embedding_dims.C1: it uses the table of 'C0'. Set model.embedding_dims.C0.",
        ),
        ({"share_tables": {"C1": "C0", "C0": "C1"}}, "'C0' cannot use the table of 'C1', which uses that of 'C0'."),
    ],
)
def test_keys_of_single_features_fit_the_dataset(keys: dict[str, Any], fact: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build("dcnv2", **keys)
    assert fact in str(caught.value)


def test_gates_of_features_that_the_dataset_lacks_are_found_before_the_network_is_built() -> None:
    values = {"data": {"path": "d"}, "model": {"name": "finalmlp", "gate1_features": ["I1"]}}  # a dense feature
    config = load_config(values).model
    with pytest.raises(ConfigError, match=r"the dataset has no table 'I1'. It has C0, C1, C2"):
        registry.load(registry.MODELS, "finalmlp", "model").tables(config, DESCRIPTION)


def test_a_mean_divides_by_the_ids_of_a_row_and_an_empty_bag_is_zero() -> None:
    """Rows (2, 4), (6, 8) of C1: the sum (8, 12) becomes (4, 6); no id gives (0, 0); C0 is summed."""
    sums = torch.tensor([[1.0, 8.0, 12.0], [3.0, 0.0, 0.0]])
    sparse = KeyedJaggedTensor(["C1", "C0"], torch.tensor([0, 1, 0, 0, 0]), lengths=torch.tensor([2, 0, 1, 2]))
    found = averaged_over_ids(sums, sparse, [("C0", 1), ("C1", 2)], ["C1"])
    assert found.tolist() == [[1.0, 4.0, 6.0], [3.0, 0.0, 0.0]]


@pytest.mark.parametrize("name", ["dcnv2", "projection"])
def test_tables_have_different_widths_where_vectors_are_concatenated(name: str) -> None:
    model = build(name, embedding_dims={"C0": 4, "C2": 32})
    assert [tuple(value.shape) for value in model.tables.state_dict().values()] == [(5, 4), (9, 8), (30, 32)]
    first = {"dcnv2": "interaction.layers.0.down.weight", "projection": "interaction.branch1.0.weight"}[name]
    assert model.state_dict()[first].shape[1] == 8 + 4 + 8 + 32
    assert model(*inputs()).isfinite().all()


def test_dot_products_need_vectors_of_one_width() -> None:
    model = {"name": "dlrm", "embedding_dims": {"C1": 16, "C2": 32}}
    with pytest.raises(ConfigError) as caught:
        load_config({"data": {"path": "d"}, "model": model})
    assert "model.embedding_dims.C2 = 32, but model.embedding_dim is 16: this model needs vectors of one width" in str(
        caught.value
    )
    assert "C1" not in str(caught.value)


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
def test_under_autocast_the_result_is_that_of_float32_up_to_rounding(name: str, mixed: MixedPrecision) -> None:
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


def test_all_contradictions_of_a_projection_are_reported_at_once() -> None:
    model = {"name": "projection", "embedding_dim": 8, "bottom_mlp": [4], "branch1_mlp": [9], "branch2_mlp": [16, 20]}
    with pytest.raises(ConfigError) as caught:
        load_config({"data": {"path": "d"}, "model": model})
    for text in (
        "model.bottom_mlp ends with 4, but model.embedding_dim is 8",
        "model.branch1_mlp ends with 9, which is not a multiple of model.embedding_dim = 8",
        "model.branch2_mlp ends with 20, which is not a multiple of model.embedding_dim = 8",
    ):
        assert text in str(caught.value)
