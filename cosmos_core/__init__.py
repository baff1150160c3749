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
    """Import hook that makes transformers and accelerate see scikit-learn, SciPy and boto3 as not installed. The two
    libraries would otherwise import these packages, and pandas, for modules that this project does not use. Without
    these imports, a process starts in a fifth less time."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        check_module_name, check_function_name = _UNUSED_DEPENDENCIES.get(name, ("", ""))
        if check_module_name in sys.modules:
            setattr(sys.modules[check_module_name], check_function_name, lambda: False)


sys.meta_path.insert(0, _OptionalDependencyHook())
for _name in ("torchao", "torch.utils._pytree"):  # hide irrelevant log warnings of these libraries
    logging.getLogger(_name).setLevel(logging.ERROR)
