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
export A='b c'
/env/bin/python -P -m recmill train '/data/Run'"'"'s 5%/jobs/config.toml' --run-dir '/data/Run'"'"'s 5%' --init-from '/data/$(old)' --procs 2 &
child=$!
trap 'kill -TERM "$child"' TERM USR1 USR2
while true; do
    wait "$child"; code=$?  # returns early when a signal is trapped
    kill -0 "$child" 2>/dev/null || break
done
wait "$child"; ended=$?  # it may have ended before kill -0, and code is then that of the signal
[ "$ended" -eq 127 ] || code=$ended
trap : TERM USR1 USR2
"$python" -P -m recmill.jobs.finish "$jobs" "$id" "$code" "$started"
exit $?
