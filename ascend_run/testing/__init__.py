"""The conformance kit: tests for built-in and third-party plugins.

``pool`` runs functions on gloo ranks that live for the whole test session; ``parity`` compares a
run with and without a plugin. Importing this package imports no torch; pytest loads
``pytest_plugin``.
"""
