"""The packages to install; everything else is in pyproject.toml.

conf/ lies at the top of the repository, where users look for it, and is installed as ``lightning_sync.conf``, so that
``pkg://lightning_sync.conf`` resolves from a wheel and from an editable install alike. pyproject.toml cannot express
"discover the packages, and add this one", hence this file.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["lightning_sync", "lightning_sync.*"]), "lightning_sync.conf"],
    package_dir={"lightning_sync.conf": "conf"},
)
