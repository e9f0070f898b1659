module @permute attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 4 : i32} {
  func.func public @main(%arg0: tensor<1x8x128xui32>) -> (tensor<1x8x128xui32>) {
    %0 = "stablehlo.collective_permute"(%arg0) {source_target_pairs = dense<[[0, 2], [2, 0], [3, 1], [1, 3]]> : tensor<4x2xi64>} : (tensor<1x8x128xui32>) -> tensor<1x8x128xui32>
    return %0 : tensor<1x8x128xui32>
  }
}
