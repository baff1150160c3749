"""Entry point of `python -m cosmos_core.worker <stage_dir>`."""

import logging
import os
import sys

from cosmos_core.imports import without_garbage_collection

with without_garbage_collection():
    from cosmos_core.worker.program import main

if __name__ == "__main__":
    # Exit without interpreter shutdown, which may hang in threads of a library; all files are written by now.
    exit_code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
