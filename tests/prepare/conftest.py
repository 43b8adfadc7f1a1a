from tests.support.installed import install as install
from tests.support.run_file import file as file
