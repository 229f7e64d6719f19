"""bundled_directory under an older name of its module."""

from genlm_backend.backends.bundled import bundled_directory as bundled_directory
