"""Compare methods on equal terms: plan a comparison, run it, resume it.

``comparison`` defines a comparison, reads it from names or a file, and expands its short forms.
``comparison_runner`` runs what is missing and attacks it if the plan says so.
``reproduction`` reads the files that reproduce the papers' tables, runs them and records the results. Tables
and pages belong to ``report``.

Compare imports ``attacks``, ``runs`` and packages below them. Changes of what counts as equal terms belong
here.
"""
