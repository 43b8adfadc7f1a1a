"""The conformance kit: what proves a plugin, for ours and for third parties alike.

``pool`` runs functions on gloo ranks that live for the whole test session, ``parity`` compares a
run with and without a plugin, ``planted`` holds wrong plugins that prove the comparison red.
Importing this package imports no torch; ``pytest_plugin`` is what pytest loads.
"""
