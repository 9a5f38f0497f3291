"""Everything private: an owner's data and model, local training, the gate, the audit log and the node
service.

- Service: ``node_service`` serves messages; ``session`` is one run, with files in ``run_folder`` and
  ``public_data_cache``. ``request_handler`` receives queries, computes responses (on a GPU with
  ``handler_runner``) and releases them through the ``gate``, and so with ``input_gradients``. ``exchanges``
  keeps recent responses, ``replies`` holds the other replies to a server.
- Owner: ``owner_folder`` with ``node_file``, ``startup_kit_faults`` and ``kit_identity``; ``policy`` with
  ``message_limits``, ``memory_limits`` and ``model_size_limits``; ``policy_faults`` and ``permission_check``
  find faults. ``admission`` and ``requests`` decide which runs may begin; ``security_events`` writes joins
  and refusals into the audit log; ``refusals`` and ``refusal_text`` reply to refused messages.
  ``request_text`` describes a request, ``overview`` the whole node.
- Training: ``node`` is data and networks, ``node_group`` computes several nodes together, ``owner_model``
  and ``model_setup`` prepare models; ``local_training``, ``dp_training``, ``initial_training``.
- Privacy: ``protection`` sets up a node's ``run_mechanism``, with ``noise_calibration`` and
  ``run_budgets``; ``privacy_forecast`` computes the cost of a run beforehand.
- Audit log: ``audit_log`` writes each release before it is handed over, as ``audit_entries``, with
  ``audit_totals``, an ``audit_head`` and an ``audit_database``; ``audit_log_inspection`` finds it in the
  owner's folder, ``spent_budget`` computes its epsilon.
- ``secure_aggregation`` (experimental): releases become masked parts of sums over nodes.

May import privacy, protocol and lower packages. Read ``gate`` first.
"""
