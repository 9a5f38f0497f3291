"""Protocol: the types that server and nodes share.

- ``method``: base class of every method, and the registry ``METHODS``.
- ``needs``: requirements of methods.
- ``queries``: declaration of the queries that a method sends to nodes.
- ``declaration_checks`` and ``tensor_forms``: checks of declarations, and of what is sent under them.
- ``payload_kinds``: meaning of each exchanged tensor, by which policies, mechanisms and reports decide.
- ``run_plan``: the server's declaration of a run, and its description for the owner's approval.
- ``messages`` and ``wire_format``: messages of the server, and their encoding.
- ``secure_aggregation``: sums over nodes.
- ``digests``: hashes of queries and histories.
- ``local_config``: optimizer, learning rate and length of the nodes' local training.

May import data, models, tasks and core.
"""
