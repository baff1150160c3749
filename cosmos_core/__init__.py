"""The trainer, its rollouts and rewards, the command line, and the programs that execute a run."""

import logging
import sys
from importlib.abc import MetaPathFinder

_UNUSED_DEPENDENCIES = {
    "transformers.generation.candidate_generator": ("transformers.utils", "is_sklearn_available"),
    "transformers.loss.loss_for_object_detection": ("transformers.utils", "is_scipy_available"),
    "accelerate.commands.config.sagemaker": ("accelerate.utils.imports", "is_boto3_available"),
}


class _OptionalDependencyHook(MetaPathFinder):
    """Import hook that makes libraries report optional dependencies as missing where this project does not use the
    modules that need them: importing scikit-learn, SciPy, pandas and boto3 takes a fifth of the time of starting a
    process."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        checked_module, check_name = _UNUSED_DEPENDENCIES.get(name, ("", ""))
        if checked_module in sys.modules:
            setattr(sys.modules[checked_module], check_name, lambda: False)


sys.meta_path.insert(0, _OptionalDependencyHook())
for _name in ("torchao", "torch.utils._pytree"):  # log warnings that do not concern this project
    logging.getLogger(_name).setLevel(logging.ERROR)
