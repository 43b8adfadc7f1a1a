from tests.support.installed import install as install
