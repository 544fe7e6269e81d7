"""Facts about this machine: cores and CPU (`cpu`), memory within the limits of control groups (`memory`).

What a CPU lists is not what it can do: a hypervisor may fault on instructions that the CPU lists. So
`precision` runs products in bfloat16 and float16 in a child process (`probe`) before training relies
on them. No torch, except in that child.
"""
