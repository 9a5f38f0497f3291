"""Communication between server and nodes, with one module per engine.

``federation`` is the base class: queries with gradients (``autograd``). ``inprocess`` has all nodes in this
process. ``remote`` reaches nodes over a ``transport``, with the options of ``link_config``: over NVIDIA FLARE
(``flare``), or by files carried by hand (``offline_files``, signed by ``signed_files``; the node's side is
``offline_node``, the server's is ``offline_link``). ``joining`` sends the messages before a node's first
query. ``replies`` and ``response_checks`` validate data from nodes, ``server_audit`` records them,
``link_costs`` measures communication, ``node_order`` sorts nodes. ``secure_aggregation`` and
``mask_exchange`` implement secure aggregation at the server.

``provision``, ``flare_permissions`` and ``admin`` set up and control a deployed federation on FLARE. Its
processes are ``flare_kit``, ``flare_site``, ``flare_component``, ``flare_job`` and ``flare_lost_nodes``.
``run_status``, ``connection_log`` and ``server_status`` report its state; ``server_rules`` restricts runs.

This package may import ``node`` and the packages below it. To add another way to reach nodes, add a module
here.
"""
