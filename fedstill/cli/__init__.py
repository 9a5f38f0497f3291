"""The commands of real federations, one file each; :mod:`fedstill.cli.main` calls them."""
