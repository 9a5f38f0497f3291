"""Everything private: an owner's data and model, their training, the gate, the audit log, the service.

- The service: ``host`` serves messages, ``session`` is one run, ``run_folder`` and ``kept_public`` what is
  kept of it. ``request_handler`` takes a query in, has it computed (on a GPU by ``recorded_handlers``) and
  hands its answer out through the ``gate``, and so with ``pulled_gradients``; ``exchanges`` are what it has
  answered last, ``replies`` what it tells a server beside.
- The owner: ``owner_folder`` with ``node_file`` and ``startup_kit``; ``policy`` is what is allowed, with
  ``message_limits``, ``memory_limits`` and ``network_limits``; ``policy_checks`` and ``permission_check`` say
  what is wrong. ``admission`` and ``requests`` are who may have a run, and which its owner approves;
  ``security_log`` has who came, was refused and let in; ``refusals`` are told and written down, in the words
  of ``refusal_text``.
  ``request_text`` is what an owner reads of a request, ``overview`` of all that goes on.
- Learning: ``node`` is data and networks, ``node_group`` computes several together, ``owner_model`` and
  ``network_setup`` make them ready; ``local_training``, ``dp_training``, ``first_training``.
- Privacy: ``protection`` puts a node under its ``run_mechanism``, with ``noise_calibration``; ``run_budgets``
  pay; ``privacy_forecast`` says beforehand what a run will cost.
- The audit log: ``audit_log`` writes down what leaves before it does, in ``audit_entries``, with
  ``audit_totals``, an ``audit_head`` and an ``audit_database``; ``audit_file`` finds it in the owner's
  folder.
- Sums: ``summand`` is what a node adds where a server sees sums only, ``sum_masks`` what covers it, under
  which ``masked_handler`` answers, ``kit_identity`` who is who, and ``cohort`` with whom it adds.

May import privacy, protocol and what lies below. A newcomer rarely changes anything here; read ``gate``
first.
"""
