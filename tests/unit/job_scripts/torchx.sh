#!/bin/bash -l
jobs='/data/Run'"'"'s 5%/jobs'
python=/env/bin/python
id="$$"
started=$(date +%s)
cd "$jobs" || {
    echo "recmill: resource error: $jobs is not visible on $(hostname). Choose a --run on a shared disk." >&2
    exit 5
}
export RECMILL_ERRORS="$jobs/$id.errors"
rm -rf "$RECMILL_ERRORS" "$id.end.json" && mkdir "$RECMILL_ERRORS"  # those of a start before a requeue
export PATH="$PATH":/env/bin
torchx run --workspace= --wait -s slurm -cfg partition=gpu REPO/src/recmill/jobs/torchx_component.py:train '--config=/data/Run'"'"'s 5%/jobs/config.toml' '--run=/data/Run'"'"'s 5%' --j=2x4 --cpu=32 '--args=--init-from '"'"'/data/$(old)'"'"''
code=$?
"$python" -P -m recmill.jobs.finish "$jobs" "$id" "$code" "$started"
exit $?
