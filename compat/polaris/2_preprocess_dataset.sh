#!/bin/sh
# Stands in for 2_preprocess_dataset.sh of argonne-lcf/dlio_ml_workloads. Give your project:
#   qsub -A PROJECT -v "DATASET_DIR=/path/to/split_dir" 2_preprocess_dataset.sh
#PBS -l filesystems=eagle:home
#PBS -l nodes=1:ppn=4
#PBS -l walltime=60:00
#PBS -q debug
exec recmill run-like 2_preprocess_dataset.sh
