"""One folder per plugin: ``__init__.py`` declares it, the modules beside it do the work."""
