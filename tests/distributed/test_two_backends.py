"""Tests of every kind of collective again, in groups that have a backend for CUDA beside gloo, as groups on GPUs have.

`pytest --two-backends` runs all tests of groups so.
"""

import pytest

from .test_auroc import test_auroc_over_ranks_equals_scikit_learns_of_all_scores
from .test_durability import test_a_new_run_starts_from_what_fits_of_an_old_one
from .test_overlap import test_overlapped_steps_equal_plain_ones
from .test_sharding import one_rank, test_two_machines_of_two_ranks_give_the_losses_of_one
from .test_world_sizes import test_any_number_of_processes_gives_the_same_losses_and_metrics

__all__ = [
    "one_rank",
    "test_a_new_run_starts_from_what_fits_of_an_old_one",
    "test_any_number_of_processes_gives_the_same_losses_and_metrics",
    "test_auroc_over_ranks_equals_scikit_learns_of_all_scores",
    "test_overlapped_steps_equal_plain_ones",
    "test_two_machines_of_two_ranks_give_the_losses_of_one",
]

pytestmark = pytest.mark.usefixtures("two_backends")
