"""How a server reaches its nodes: the contract, and one file an engine.

``federation`` is the contract, a differentiable function of what is asked (``autograd``): every engine
answers to it. ``inprocess`` has all nodes in this process, ``remote`` nodes behind a ``transport``, as
``link_config`` says: ``flare`` over NVIDIA FLARE; by files that people carry (``offline_files``, signed by
``signed_files``; a node's half is ``offline_node``, the server's ``offline_link``). ``joining`` is what
comes before a node's first query, ``arrivals`` the server's log. ``replies`` and ``answer_checks`` decide
whom a server believes, ``meter`` counts what the link costs, ``node_order`` is the order of nodes. ``summed``
is what holds where a server sees sums only, and ``sum_exchange`` what it carries between nodes for that.

A real federation is made by ``provision``, ``flare_permissions`` and ``admin``, and runs by FLARE's public
parts: ``flare_kit``, ``flare_site``, ``flare_component``, ``flare_job``; ``run_status``, ``connection_log``
and ``server_view`` tell how it is.

May import node and what lies below. A newcomer adds another way to reach nodes here.
"""
