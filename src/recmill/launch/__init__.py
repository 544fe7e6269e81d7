"""Start the processes of a job (`local`, `worker`), and handle signals, failures and hangs. No torch."""
