from tests.support.token_files import run_config as run_config
from tests.support.token_files import write_dataset as write_dataset
