"""``python -m ascend_run``: the same as ``ascend-run``, as torchrun's ``-m`` needs it."""

from ascend_run.entrypoints.cli import main

if __name__ == "__main__":
    main()
