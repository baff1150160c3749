"""Stage kind `custom`: call a user's function, `entry = "module:function"`, with the stage and its `arguments`."""

from cosmos_core.run.libraries import USER_CODE_LIBRARIES
from cosmos_core.types import StageKind

KIND = StageKind(
    name="custom",
    entry="",
    result_version=1,
    required_keys={"entry": '"module:function" or "path/file.py:function"'},
    allowed_keys=("entry", "arguments", "env", "reward_service", "reward_service_pool"),
    libraries=USER_CODE_LIBRARIES,
)
