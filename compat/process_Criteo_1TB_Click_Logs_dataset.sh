#!/bin/sh
# Stands in for process_Criteo_1TB_Click_Logs_dataset.sh of facebookresearch/dlrm: RAW TEMPORARY OUTPUT
exec recmill run-like process_Criteo_1TB_Click_Logs_dataset.sh -- "$@"
