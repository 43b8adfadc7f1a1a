from tests.support.token_files import write_dataset as write_dataset
