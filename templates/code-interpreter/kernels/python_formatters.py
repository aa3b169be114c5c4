"""Run by each Python kernel at its start: data frames and figures are also shown as what they hold."""


def _register():
    import json
    import sys

    from IPython import get_ipython
    from IPython.core.formatters import BaseFormatter
    from traitlets import ObjectName, Unicode

    class DataFormatter(BaseFormatter):
        format_type = Unicode("e2b/data")
        print_method = ObjectName("_repr_e2b_data_")
        _return_type = dict

    class ChartFormatter(BaseFormatter):
        format_type = Unicode("e2b/chart")
        print_method = ObjectName("_repr_e2b_chart_")
        _return_type = dict

        def __call__(self, shown):
            # Not by type: whoever sets Matplotlib's inline backend up takes figures away from all formatters.
            module = sys.modules.get("matplotlib.figure")
            return chart(shown) if module and isinstance(shown, module.Figure) else None

    def data(frame):
        columns = {}
        for name in frame.columns:
            column = frame[name]
            if column.dtype.kind in "mM":
                values = [None if value is None or value != value else value.isoformat() for value in column]
            else:
                values = column.astype(object).where(column.notna(), None).tolist()
            columns[str(name)] = values
        return columns

    def chart(figure):
        from e2b_charts import chart_figure_to_dict

        try:
            return json.loads(json.dumps(chart_figure_to_dict(figure), default=str))
        except Exception:
            # What it does not know is still a picture.
            return None

    formatter = get_ipython().display_formatter
    for made in (DataFormatter(parent=formatter), ChartFormatter(parent=formatter)):
        formatter.formatters[made.format_type] = made
    formatter.formatters["e2b/data"].for_type_by_name("pandas.core.frame", "DataFrame", data)
    formatter.formatters["e2b/data"].for_type_by_name("pandas", "DataFrame", data)


_register()
del _register
