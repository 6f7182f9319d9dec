"""`prefix-gateway doctor`: looks at a deployment from outside and names each misconfiguration with its fix."""
