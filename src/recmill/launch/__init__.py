"""Starting the processes of a job, and what happens to them: signals, failures, hangs. No torch.

Entry points: `local.run_job` in the parent, `worker` in each process, `signals.stop_on` and `watchdog.watching` in a
training run.
"""
