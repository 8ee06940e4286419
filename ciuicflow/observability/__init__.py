"""What operators see: metrics, quantiles and log lines."""
