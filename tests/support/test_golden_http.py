"""Metrics in the form of the recordings. ``test_golden`` covers HTTP, with a running program."""

from tests.support import golden_http

TEXT = """\
# HELP kubeproxy_syncs_total Syncs.
# TYPE kubeproxy_syncs_total counter
kubeproxy_syncs_total 3.0
# TYPE kubeproxy_pending gauge
kubeproxy_pending{traffic_policy="external",ip_family="IPv4"} 2.0
# TYPE kubeproxy_duration_seconds histogram
kubeproxy_duration_seconds_bucket{ip_family="IPv4",le="0.001"} 0.0
kubeproxy_duration_seconds_bucket{ip_family="IPv4",le="+Inf"} 3.0
kubeproxy_duration_seconds_sum{ip_family="IPv4"} 0.5
kubeproxy_duration_seconds_count{ip_family="IPv4"} 3.0
# TYPE python_info gauge
python_info{version="3"} 1.0
"""


def test_metrics_have_type_labels_in_order_buckets_and_only_requested_values() -> None:
    pending = 'kubeproxy_pending{ip_family="IPv4",traffic_policy="external"}'
    assert golden_http.parse_metrics(TEXT, [pending]) == {
        "kubeproxy_syncs_total{}": {"type": "counter"},
        pending: {"type": "gauge", "value": 2.0},
        'kubeproxy_duration_seconds{ip_family="IPv4"}': {"type": "histogram", "buckets": ["0.001", "+Inf"]},
    }
