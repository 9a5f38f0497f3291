"""How a server reaches its nodes: the contract, and one file an engine.

``contract`` is the federation as a differentiable function of what is asked (``autograd``): every engine
answers to it. ``inprocess`` has all nodes in this process, ``remote`` nodes behind a link (``carrier``,
``meter``): ``flare`` over NVIDIA FLARE, ``files`` by ``bundles`` that people carry. ``checks`` and
``replies`` decide whom a server believes. ``provision``, ``rules``, ``site``, ``component``, ``job`` and
``admin`` make and run a real federation, by FLARE's public parts.

May import node and what lies below. A newcomer adds another way to reach nodes here.
"""
