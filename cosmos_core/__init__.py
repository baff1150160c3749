"""The trainer, its rollouts and rewards, the command line, and what runs them."""

import sys
from importlib.abc import MetaPathFinder

_UNUSED = {
    "transformers.generation.candidate_generator": ("transformers.utils", "is_sklearn_available"),
    "transformers.loss.loss_for_object_detection": ("transformers.utils", "is_scipy_available"),
    "accelerate.commands.config.sagemaker": ("accelerate.utils.imports", "is_boto3_available"),
}


class _Lean(MetaPathFinder):
    """Lets modules think that a library is not installed which they import for what nothing here uses: scikit-learn,
    SciPy, pandas and boto3 are a fifth of the time in which a process starts."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        where, asked = _UNUSED.get(name, ("", ""))
        if where in sys.modules:
            setattr(sys.modules[where], asked, lambda: False)


sys.meta_path.insert(0, _Lean())
