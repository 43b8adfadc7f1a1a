"""``ascend-run new-plugin``: write a package outside the tree that installs and passes the kit."""
