from tests.support.needed_plugins import pytest_collection_modifyitems as deselect_cases
from tests.support.session import pytest_configure as prepare_session

pytest_configure = prepare_session
pytest_collection_modifyitems = deselect_cases
