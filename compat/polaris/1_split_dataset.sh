#!/bin/sh
# Stands in for 1_split_dataset.sh of argonne-lcf/dlio_ml_workloads: DATASET_DIR SPLIT_DIR [SPLIT_LINE]
exec recmill run-like 1_split_dataset.sh -- "$@"
