"""What a run's student is good for once the run is over: it is loaded, asked, measured elsewhere, taken away.

``central_model`` is a student as a torch module that takes inputs as they are, pixels or cells, by
``raw_inputs``. ``new_data`` reads data that were not the run's own; ``predict`` asks the student about them,
``evaluate`` measures it on them, by the code that measures runs. ``export`` writes it for other tools and
compares what these make of it; ``hugging_face`` is its form in that library.

May import runs and what lies below. A newcomer adds a format: a function in ``export`` and a line in
``FORMATS``.
"""
