"""A renderer of charts with Helm's own code, which checks them against Kubernetes' schemas.

Run `python render_chart.py CHART VALUES`. It prints a JSON object: `objects`, or an `error` of Helm
or of a schema. It runs in the environment of test_chart.py.
"""

import json
import sys

import helm_python
import kubernetes_validate
import yaml

UNKNOWN = ("ServiceMonitor",)  # the Prometheus Operator's, of which Kubernetes has no schema


def main() -> None:
    chart, values = sys.argv[1], json.loads(sys.argv[2])
    try:
        linted = helm_python.chart.lint(chart, values, strict=True)
        with helm_python.Chart.load(chart) as loaded:
            loaded.validate_schema(values)
            texts = loaded.render(values, name="moa", namespace="prod").values()
    except helm_python.HelmError as error:
        print(json.dumps({"error": str(error)}))
        return
    objects = [found for text in texts for found in yaml.safe_load_all(text) if found]
    for found in objects:
        if found["kind"] not in UNKNOWN:
            kubernetes_validate.validate(found, "1.30", strict=True)
    print(json.dumps({"objects": objects, "lint": linted["messages"]}))


main()
