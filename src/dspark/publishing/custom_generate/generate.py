"""Decode with the drafter in this repository: the target's own text, in fewer passes.

model.generate(**inputs, custom_generate="this folder or repository", trust_remote_code=True)
"""

try:
    from dspark.decoding.repository import generate_from_repository as generate
except ModuleNotFoundError as error:
    raise ImportError(
        f"This drafter is run by the package dspark, which cannot be imported here ({error}): pip install dspark"
    ) from error

__all__ = ["generate"]
