"""Logistic regression, FM, DeepFM and FinalMLP against their formulas, worked out row by row in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill.nn.field_networks import FactorNetwork, LinearNetwork, TwoStreamNetwork
from recmill.tables.spec import TableSpec

CPU = torch.device("cpu")
WIDTH, NUM_DENSE, ROWS = 4, 2, 6
TABLES = [TableSpec("table_a", "a", 5, WIDTH, 0.5, ("c",)), TableSpec("table_b", "b", 7, WIDTH, 0.5)]
FEATURES = {"a": "table_a", "c": "table_a", "b": "table_b"}  # in the order of the fields, with their tables
NETWORKS: dict[str, Any] = {
    "logistic": lambda: LinearNetwork(TABLES, NUM_DENSE, CPU, ["b"]),
    "fm": lambda: FactorNetwork(TABLES, NUM_DENSE, [], CPU, ["b"]),
    "deepfm": lambda: FactorNetwork(TABLES, NUM_DENSE, [6, 5], CPU, ["b"]),
    "finalmlp": lambda: TwoStreamNetwork(
        TABLES, NUM_DENSE, ([6, 4], [5, 8]), [3], (["b", "a"], []), num_heads=2, device=CPU, averaged=["b"]
    ),
    "finalmlp without gates": lambda: TwoStreamNetwork(
        TABLES, NUM_DENSE, ([6, 4], [5, 8]), [], ([], []), num_heads=1, device=CPU, averaged=["b"]
    ),
}


def build(name: str) -> Any:
    torch.manual_seed(3)
    network = NETWORKS[name]()
    for parameter in network.parameters():  # none may be so small that its part of the result is not seen
        torch.nn.init.uniform_(parameter, -1, 1)
    return network


def inputs() -> tuple[torch.Tensor, KeyedJaggedTensor, list[dict[str, list[int]]]]:
    """Dense values and 0 to 3 ids per row and feature, also as lists."""
    random = np.random.default_rng(4)
    ids = [{f: random.integers(0, 5, random.integers(0, 4)).tolist() for f in FEATURES} for _ in range(ROWS)]
    lengths = [len(row[f]) for f in FEATURES for row in ids]
    values = [number for f in FEATURES for row in ids for number in row[f]]
    dense = torch.tensor(random.normal(size=(ROWS, NUM_DENSE)), dtype=torch.float32)
    return dense, KeyedJaggedTensor([*FEATURES], torch.tensor(values), lengths=torch.tensor(lengths)), ids


class Formula:
    """Computes the logit of one row from the weights in `state`, in plain NumPy."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.state = {key: value.double().numpy() for key, value in state.items()}

    def bag(self, feature: str, ids: list[int]) -> np.ndarray:
        rows = self.state[f"tables.embedding_bags.{FEATURES[feature]}.weight"]
        total = sum((rows[number] for number in ids), np.zeros(WIDTH))
        return total / max(len(ids), 1) if feature == "b" else total

    def layer(self, name: str, x: np.ndarray) -> np.ndarray:
        return self.state[f"{name}.weight"] @ x + self.state.get(f"{name}.bias", 0.0)

    def mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        for number in sorted(
            {int(key[len(name) + 1 :].split(".")[0]) for key in self.state if key.startswith(f"{name}.")}
        ):
            x = np.maximum(self.layer(f"{name}.{number}", x), 0)
        return x

    def factors(self, dense: np.ndarray, bags: list[np.ndarray]) -> list[np.ndarray]:
        return [x * v for x, v in zip(dense, self.state["dense_factors"], strict=True)] + bags

    def logistic(self, dense: np.ndarray, bags: list[np.ndarray]) -> float:
        return float(self.layer("linear", dense)[0]) + sum(bag[0] for bag in bags)

    def fm(self, dense: np.ndarray, bags: list[np.ndarray]) -> float:
        vectors = self.factors(dense, [bag[1:] for bag in bags])
        pairs = [v @ w for at, v in enumerate(vectors) for w in vectors[at + 1 :]]
        return self.logistic(dense, bags) + sum(pairs)

    def deepfm(self, dense: np.ndarray, bags: list[np.ndarray]) -> float:
        flat = np.concatenate(self.factors(dense, [bag[1:] for bag in bags]))
        return self.fm(dense, bags) + float(self.layer("logit", self.mlp("deep", flat))[0])

    def gate(self, number: int, context: np.ndarray) -> np.ndarray:
        out = self.layer(f"gates.{number}.out", self.mlp(f"gates.{number}.hidden", context))
        return np.array([2 / (1 + math.exp(-x)) for x in out])

    def finalmlp(self, dense: np.ndarray, bags: list[np.ndarray], num_heads: int = 2) -> float:
        flat = np.concatenate(self.factors(dense, bags))
        given = [flat, flat]
        if num_heads == 2:  # the network with gates
            by_feature = dict(zip(FEATURES, bags, strict=True))
            contexts = [np.concatenate([by_feature["b"], by_feature["a"]]), self.state["gates.1.constant"][0]]
            given = [flat * self.gate(number, context) for number, context in enumerate(contexts)]
        left, right = (self.mlp(f"streams.{number}", x) for number, x in enumerate(given))
        logit = float(self.layer("logits.0", left)[0] + self.layer("logits.1", right)[0])
        for head in range(num_heads):
            x = left.reshape(num_heads, -1)[head]
            logit += x @ self.state["bilinear"][head] @ right.reshape(num_heads, -1)[head]
        return logit


def logits(name: str, state: dict[str, torch.Tensor]) -> np.ndarray:
    formula = Formula(state)
    dense, _, ids = inputs()
    found = []
    for row in range(ROWS):
        bags = [formula.bag(feature, ids[row][feature]) for feature in FEATURES]
        x = dense[row].double().numpy()
        without_gates = name == "finalmlp without gates"
        found.append(formula.finalmlp(x, bags, 1) if without_gates else getattr(formula, name)(x, bags))
    return np.array(found)


@pytest.mark.parametrize("name", NETWORKS)
def test_logits_and_gradients_are_those_of_the_formula(name: str) -> None:
    network = build(name)
    dense, sparse, _ = inputs()
    found = network(dense, sparse)
    np.testing.assert_allclose(found.detach().numpy(), logits(name, network.state_dict()), rtol=2e-5, atol=2e-5)
    found.square().sum().backward()
    state = {key: value.double() for key, value in network.state_dict().items()}
    for key, parameter in network.named_parameters():
        direction = torch.randn(parameter.shape, dtype=torch.float64)
        after, before = (
            np.square(logits(name, state | {key: state[key] + step * direction})).sum() for step in (1e-6, -1e-6)
        )
        slope = (parameter.grad.double() * direction).sum().item()
        assert slope == pytest.approx((after - before) / 2e-6, rel=1e-3, abs=1e-3), key


@pytest.mark.parametrize("name", ["logistic", "deepfm", "finalmlp"])
@pytest.mark.filterwarnings("error")
def test_no_dense_feature_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "NUM_DENSE", 0)
    torch.manual_seed(3)
    network = NETWORKS[name]()
    dense, sparse, _ = inputs()
    np.testing.assert_allclose(
        network(dense, sparse).detach().numpy(), logits(name, network.state_dict()), rtol=2e-5, atol=2e-5
    )
